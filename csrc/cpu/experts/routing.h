// The rows of each expert: all tokens' choices of experts, sorted by expert.
#pragma once

#include <vector>

#include "csrc/common.h"

namespace fusedops::cpu::experts {

// Rows [first, first + count) are the expert's.
struct Share {
  int64_t expert, first, count;
};

// A slot is a token's choice, token * k + choice. Rows are slots in order of expert, and of slot
// for each expert; slots without an expert have none.
struct Routing {
  explicit Routing(const Tensor& index, int64_t experts);

  Tensor index;  // contiguous
  int64_t tokens, k, experts;
  std::vector<int64_t> slots;   // of each row
  std::vector<int64_t> places;  // the row of each slot, or -1
  std::vector<Share> shares;    // of the experts that were hit

  int64_t rows() const { return static_cast<int64_t>(slots.size()); }
  const int64_t* chosen() const { return index.const_data_ptr<int64_t>(); }

  // The tokens of all rows: t [tokens, n] becomes [rows, n], contiguous.
  Tensor gather(const Tensor& t) const;

  // Adjacent experts, of about `most` rows together. Their shares count rows from the part's first
  // one on. A part has no places.
  std::vector<Routing> parts(int64_t most) const;

 private:
  Routing(const Routing& whole, size_t begin, size_t end);  // of these shares
};

}  // namespace fusedops::cpu::experts
