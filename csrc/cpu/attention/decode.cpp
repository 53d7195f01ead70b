// Attention's forward on CPUs for a few queries per head, as in generation.
//
// The queries of all heads that share k and v are the rows of one tile, so k and v are read once,
// in their own dtype; reading them takes most of the time. The keys are split into parts that do
// not depend on the number of threads, and the parts are combined in order.

#include <ATen/Parallel.h>

#include "csrc/cpu/attention/heads.h"
#include "csrc/cpu/isa/attention/decode.h"

namespace fusedops::cpu::attention {
namespace {

constexpr int64_t kRows = 64;    // maximum rows per tile
constexpr int64_t kPart = 1024;  // keys per part

// A tile's softmax and sums over one part of the keys.
struct Part {
  std::vector<Softmax> softmax;
  std::vector<float> sums;
};

void scale(Part& part, int64_t row, int64_t width, float factor) {
  if (factor != 1) scale_row_for_isa()(part.sums.data() + row * width, width, factor);
}

// Returns n keys or values from `key` on. each: room for their addresses.
KeyRows rows_of(const Heads& of, const Sequence& at, int64_t head, int64_t key, int64_t n,
                std::vector<const void*>& each) {
  if (at.blocks == nullptr) return {of.keys(at, head, key)};
  const int64_t count = std::min(n + kAhead, at.keys - key);
  each.resize(kKeys + kAhead);
  of.find(at, head, key, count, each.data());
  std::fill(each.begin() + count, each.begin() + n + kAhead, each[count - 1]);
  return {{nullptr, 0, of.dtype()}, each.data()};
}

// Computes the part for keys [first, last) of a head.
Part read(const Problem& problem, const Sequence& at, int64_t head, int64_t first, int64_t last) {
  const int64_t group = problem.group(), rows = group * at.queries;
  const int64_t width = problem.q.width(), v_width = problem.v.width(),
                ld = padded(width, 2 * kEdge);
  Part part{std::vector<Softmax>(rows), std::vector<float>(rows * v_width)};
  if (first >= last) return part;
  std::vector<const void*> each;
  std::vector<float> q(rows * ld), scores(rows * kKeys), scratch(rows * std::max(ld, kKeys));
  for (int64_t g = 0; g < group; ++g) {
    read_rows_for_isa()(problem.q.rows(at.batch, head * group + g, at.q_begin), at.queries, width,
                        at.queries, q.data() + g * at.queries * ld, ld);
  }
  for (int64_t key = first; key < last; key += kKeys) {
    const int64_t n = std::min(kKeys, last - key);
    query_products_for_isa()(q.data(), ld, rows, rows_of(problem.k, at, head, key, n, each), n,
                             width, scores.data(), kKeys, scratch.data());
    for (int64_t r = 0; r < rows; ++r) {
      const auto row = problem.scores(at, head * group + r / at.queries, r % at.queries, key, n,
                                      scores.data() + r * kKeys);
      add_scores_for_isa()(row, problem.map(), part.softmax[r], row.s, Dtype::float32);
      scale(part, r, v_width, part.softmax[r].factor);
    }
    add_values_for_isa()(scores.data(), kKeys, rows, rows_of(problem.v, at, head, key, n, each), n,
                         v_width, part.sums.data(), scratch.data());
  }
  return part;
}

// Adds `more`, the next part, to `whole`.
void join(Part& whole, Part& more, int64_t width) {
  for (size_t r = 0; r < whole.softmax.size(); ++r) {
    auto &a = whole.softmax[r], &b = more.softmax[r];
    if (b.most == -std::numeric_limits<float>::infinity()) continue;
    const float most = a.most > b.most ? a.most : b.most;
    const float factor_a = std::exp(a.most - most), factor_b = std::exp(b.most - most);
    scale(whole, r, width, factor_a);
    scale(more, r, width, factor_b);
    for (int64_t d = 0; d < width; ++d) whole.sums[r * width + d] += more.sums[r * width + d];
    a.sum = a.sum * factor_a + b.sum * factor_b;
    a.most = most;
  }
}

}  // namespace

bool decodes(const Problem& problem, const Sequence& at) {
  return at.queries * problem.group() <= kRows;
}

void decode(const Problem& problem, const Heads& out, double* lse) {
  // Each sequence's own parts, and at least one. As many as the longest sequence has would take
  // memory for nothing, and threads would get equal numbers of parts, not of keys.
  struct Task {
    const Sequence* at;
    int64_t first, last;
  };
  std::vector<Task> tasks;
  std::vector<size_t> starts;  // each sequence's first task
  for (const auto& at : problem.sequences) {
    starts.push_back(tasks.size());
    if (at.queries == 0) continue;
    auto [first, last] = problem.seen(at, 0, at.queries);
    do {
      const int64_t end = std::min(last, (first / kPart + 1) * kPart);
      tasks.push_back({&at, first, end});
      first = end;
    } while (first < last);
  }
  starts.push_back(tasks.size());

  const int64_t heads = problem.k.heads(), group = problem.group(), width = problem.v.width();
  std::vector<Part> parts(tasks.size() * heads);
  at::parallel_for(0, parts.size(), problem.grain(parts.size()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // All heads of a part, one after the other: their keys may be next to each other.
      const auto& [at, first, last] = tasks[i / heads];
      parts[i] = read(problem, *at, i % heads, first, last);
    }
  });
  for (size_t s = 0; s < problem.sequences.size(); ++s) {
    const auto& at = problem.sequences[s];
    for (int64_t head = 0; head < heads && at.queries > 0; ++head) {
      auto& whole = parts[starts[s] * heads + head];
      for (size_t i = starts[s] + 1; i < starts[s + 1]; ++i) {
        join(whole, parts[i * heads + head], width);
      }
      for (int64_t r = 0; r < group * at.queries; ++r) {
        finish_row(problem, at, head * group + r / at.queries, r % at.queries, whole.softmax[r],
                   whole.sums.data() + r * width, out, lse);
      }
    }
  }
}

}  // namespace fusedops::cpu::attention
