// Keys or values of all heads as the products take them.
#pragma once

#include <ATen/Parallel.h>

#include "csrc/cpu/attention/heads.h"

namespace fusedops::cpu {

constexpr int64_t kQueries = 64;  // of a block

// In float32 tiles of kKeys rows, each sequence from a tile of its own on, zeros past its end.
class Packed {
 public:
  enum class Layout { rows, transposed };  // [kKeys, width], [width, kKeys]

  Packed(const Problem& problem, const Heads& heads, Layout layout)
      : heads_(heads.heads()), group_(problem.q.heads() / std::max<int64_t>(heads.heads(), 1)) {
    const bool turned = layout == Layout::transposed;
    width_ = heads.width();
    tile_ = kKeys * (turned ? padded(width_) : width_);
    for (const auto& at : problem.sequences) {
      first_.push_back(tiles_);
      tiles_ += (at.keys + kKeys - 1) / kKeys;
    }
    begin_ = problem.sequences.data();
    data_ = at::empty({heads_ * tiles_ * tile_}, at::kFloat);
    auto* const to = data_.mutable_data_ptr<float>();
    at::parallel_for(0, heads_, 1, [&](int64_t from, int64_t end) {
      std::vector<float> rows(turned ? tile_ : 0);
      for (int64_t head = from; head < end; ++head) {
        for (size_t i = 0; i < problem.sequences.size(); ++i) {
          const auto& at = problem.sequences[i];
          for (int64_t key = 0; key < at.keys; key += kKeys) {
            const int64_t n = std::min(kKeys, at.keys - key);
            auto* const tile = to + (head * tiles_ + first_[i] + key / kKeys) * tile_;
            const auto source = heads.rows(at.batch, head, at.k_begin + key);
            const int64_t ld = turned ? padded(width_) : width_;
            read_rows_for_isa()(source, n, width_, padded(n), turned ? rows.data() : tile, ld);
            if (turned) transpose_for_isa()(rows.data(), ld, padded(n), ld, tile, kKeys);
          }
        }
      }
    });
  }

  // That of a query head's keys from `key` on, a multiple of kKeys.
  const float* tile(const Sequence& at, int64_t head, int64_t key) const {
    const int64_t tile = first_[&at - begin_] + key / kKeys;
    return data_.const_data_ptr<float>() + (head / group_ * tiles_ + tile) * tile_;
  }

 private:
  int64_t heads_, group_, width_, tile_, tiles_ = 0;
  std::vector<int64_t> first_;
  const Sequence* begin_;
  Tensor data_;
};

}  // namespace fusedops::cpu
