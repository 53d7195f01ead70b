// Keys or values of all heads as the products take them.
#pragma once

#include <ATen/Parallel.h>

#include "csrc/cpu/attention/products.h"

namespace fusedops::cpu {

constexpr int64_t kQueries = 64;  // of a block

// A transposed operand's columns are padded to it.
template <class T>
constexpr int64_t kColumns = kEdge * sizeof(float) / sizeof(T);

// How many terms a product over `width` adds, with the zeros of the padding.
template <class T>
int64_t terms(int64_t width) {
  return padded(width, sizeof(float) / sizeof(T));
}

enum class Layout { rows, transposed };  // a tile is [kKeys, width], [width, kKeys]

// Second operands in tiles of kKeys rows, each sequence from a tile of its own on, zeros past its
// end.
template <class T>
class Packed {
 public:
  Packed(const Problem& problem, const Heads& heads, Layout layout)
      : heads_(heads.heads()), group_(problem.q.heads() / std::max<int64_t>(heads.heads(), 1)) {
    const bool turned = layout == Layout::transposed;
    const int64_t width = heads.width(), ld = turned ? padded(width, kColumns<T>) : width;
    tile_ = kKeys * ld;
    for (const auto& at : problem.sequences) {
      first_.push_back(tiles_);
      tiles_ += (at.keys + kKeys - 1) / kKeys;
    }
    begin_ = problem.sequences.data();
    data_ = at::empty({heads_ * tiles_ * tile_}, c10::CppTypeToScalarType<T>::value);
    auto* const to = data_.mutable_data_ptr<T>();
    at::parallel_for(0, heads_, 1, [&](int64_t from, int64_t end) {
      std::vector<T> rows(turned ? tile_ : 0);
      for (int64_t head = from; head < end; ++head) {
        for (size_t i = 0; i < problem.sequences.size(); ++i) {
          const auto& at = problem.sequences[i];
          for (int64_t key = 0; key < at.keys; key += kKeys) {
            const int64_t n = std::min(kKeys, at.keys - key);
            auto* const tile = to + (head * tiles_ + first_[i] + key / kKeys) * tile_;
            const auto source = heads.rows(at.batch, head, at.k_begin + key);
            if (turned) {
              read_rows(source, n, width, padded(n), rows.data(), ld);
              transpose_second(rows.data(), ld, padded(n), ld, tile, kKeys);
            } else {
              read_second(source, n, width, padded(n), tile);
            }
          }
        }
      }
    });
  }

  // That of a query head's keys from `key` on, a multiple of kKeys.
  const T* tile(const Sequence& at, int64_t head, int64_t key) const {
    const int64_t tile = first_[&at - begin_] + key / kKeys;
    return data_.const_data_ptr<T>() + (head / group_ * tiles_ + tile) * tile_;
  }

 private:
  int64_t heads_, group_, tile_, tiles_ = 0;
  std::vector<int64_t> first_;
  const Sequence* begin_;
  Tensor data_;
};

}  // namespace fusedops::cpu
