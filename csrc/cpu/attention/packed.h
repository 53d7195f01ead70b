// One head's keys or values, packed in tiles as operands of matrix products.
#pragma once

#include <cstring>

#include "csrc/cpu/attention/heads.h"

namespace fusedops::cpu::attention {

// The multiple to which a transposed operand's columns are padded.
template <class T>
constexpr int64_t kColumns = kEdge * sizeof(float) / sizeof(T);

// How many terms a product over `width` adds, padding included.
template <class T>
int64_t terms(int64_t width) {
  return padded(width, sizeof(float) / sizeof(T));
}

enum class Layout { rows, transposed };  // a tile is [side, width] or [width, side]

// A head's keys or values as second operands, in tiles of `side` rows, padded with zeros.
template <class T>
class Packed {
 public:
  Packed(const Heads& heads, Layout layout, int64_t side)
      : heads_(&heads),
        layout_(layout),
        side_(side),
        width_(heads.width()),
        ld_(layout == Layout::rows ? width_ : padded(width_, kColumns<T>)) {}

  // Packs one sequence.
  void pack(const Sequence& at, int64_t head) {
    const size_t size = padded(at.keys, side_) * ld_;
    if (data_.size() < size) data_.resize(size);
    for (int64_t key = 0; key < at.keys; key += side_) {
      const int64_t n = std::min(side_, at.keys - key);
      const auto source = rows(at, head, key, n);
      auto* const to = data_.data() + key * ld_;
      if (layout_ == Layout::rows) {
        read_second(source, n, width_, padded(n), to);
      } else {
        rows_.resize(side_ * ld_);
        read_rows(source, n, width_, padded(n), rows_.data(), ld_);
        transpose_second(rows_.data(), ld_, padded(n), ld_, to, side_);
      }
    }
  }

  // Returns the tile that starts at `key`, a multiple of the side.
  const T* tile(int64_t key) const { return data_.data() + key * ld_; }

 private:
  // Returns n rows from `key` on. A paged cache's are copied, this tile's only.
  RowsOf rows(const Sequence& at, int64_t head, int64_t key, int64_t n) {
    if (at.blocks == nullptr) return heads_->keys(at, head, key);
    const int64_t bytes = width_ * heads_->bytes();
    each_.resize(side_);
    copied_.resize(side_ * bytes);
    heads_->find(at, head, key, n, each_.data());
    for (int64_t i = 0; i < n; ++i) std::memcpy(copied_.data() + i * bytes, each_[i], bytes);
    return {copied_.data(), width_, heads_->dtype()};
  }

  const Heads* heads_;
  Layout layout_;
  int64_t side_, width_, ld_;
  std::vector<T> data_, rows_;
  std::vector<const void*> each_;
  std::vector<char> copied_;
};

}  // namespace fusedops::cpu::attention
