// Sorts the tokens by chosen expert, by counting sort, and gathers their rows in that order.

#include "csrc/cpu/experts/routing.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <cstring>

#include "csrc/cpu/grain.h"

namespace fusedops::cpu::experts {

Routing::Routing(const Tensor& index_, int64_t experts_)
    : index(index_.contiguous()),
      tokens(index_.size(0)),
      k(index_.size(1)),
      experts(experts_),
      places(index_.numel(), -1) {
  const auto* const expert_of = chosen();
  std::vector<int64_t> first(experts + 2, 0);  // of each expert; first[e + 1] counts before
  for (size_t slot = 0; slot < places.size(); ++slot) {
    const int64_t expert = expert_of[slot];
    TORCH_CHECK_VALUE(expert >= 0 && expert <= experts, "experts: top_k_index must be from 0 to ",
                      experts, ", got ", expert);
    ++first[expert + 1];
  }
  for (int64_t expert = 0; expert <= experts; ++expert) {
    if (expert < experts && first[expert + 1] > 0) {
      shares.push_back({expert, first[expert], first[expert + 1]});
    }
    first[expert + 1] += first[expert];
  }
  slots.resize(first[experts]);
  for (size_t slot = 0; slot < places.size(); ++slot) {
    const int64_t expert = expert_of[slot];
    if (expert == experts) continue;
    places[slot] = first[expert]++;
    slots[places[slot]] = static_cast<int64_t>(slot);
  }
}

Routing::Routing(const Routing& whole, size_t begin, size_t end)
    : index(whole.index),
      tokens(whole.tokens),
      k(whole.k),
      experts(whole.experts),
      shares(whole.shares.begin() + begin, whole.shares.begin() + end) {
  const auto first = whole.slots.begin() + shares.front().first;
  const auto& last = shares.back();
  slots.assign(first, whole.slots.begin() + last.first + last.count);
  for (const int64_t offset = shares.front().first; auto& share : shares) share.first -= offset;
}

std::vector<Routing> Routing::parts(int64_t most) const {
  std::vector<Routing> routings;
  for (size_t begin = 0, end = 0; begin < shares.size(); begin = end) {
    int64_t sum = 0;
    do {
      sum += shares[end++].count;
    } while (end < shares.size() && sum + shares[end].count <= most);
    routings.push_back(Routing(*this, begin, end));
  }
  return routings;
}

Tensor Routing::gather(const Tensor& t) const {
  const auto from = t.contiguous();
  const int64_t n = t.size(1), bytes = n * from.element_size();
  auto out = at::empty({rows(), n}, t.options());
  const auto* const source = static_cast<const char*>(from.const_data_ptr());
  auto* const to = static_cast<char*>(out.mutable_data_ptr());
  at::parallel_for(0, rows(), kGrain / std::max<int64_t>(n, 1) + 1,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       std::memcpy(to + row * bytes, source + slots[row] / k * bytes, bytes);
                     }
                   });
  return out;
}

}  // namespace fusedops::cpu::experts
