// attention on CPUs, forward: a block of queries of a head at a time.
//
// K and V are packed once a call, K transposed, in tiles of kKeys keys, float32. A block of
// kQueries queries goes over the tiles that one of them sees: a product, the softmax's row loops in
// the cache, and a product into the block's sums. 4 S^2 D operations of a head and S^2
// exponentials, half of both with `causal`; memory beside the results: the packed K and V, and a
// tile of scores a thread.

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "csrc/cpu/attention/heads.h"
#include "csrc/cpu/attention/packed.h"

namespace fusedops::cpu {

namespace {

// Whether oneDNN has these products in float32 here.
bool has_brgemm() {
  std::vector<float> a(kEdge * kEdge), b(a), c(a);
  try {
    at::native::cpublas::brgemm(kEdge, kEdge, kEdge, kEdge, kEdge, kEdge, false, a.data(), b.data(),
                                c.data(), false);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

namespace {

void one_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t ld_a, const float* b,
                 int64_t ld_b, float* c, int64_t ld_c) {
  static const bool found = has_brgemm();
  if (found) return at::native::cpublas::brgemm(m, n, k, ld_a, ld_b, ld_c, false, a, b, c, false);
  const auto matrix = [](const float* x, int64_t rows, int64_t columns, int64_t ld) {
    return at::from_blob(const_cast<float*>(x), {rows, columns}, {ld, 1}, at::kFloat);
  };
  auto out = matrix(c, m, n, ld_c);
  at::mm_out(out, matrix(a, m, k, ld_a), matrix(b, k, n, ld_b));
}

}  // namespace

void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t ld_a, const float* b,
             int64_t ld_b, float* c, int64_t ld_c, bool add) {
  // How many terms are added one after another. Of a few rows torch's products are more exact too.
  const int64_t chain = m <= 2 * kEdge ? kEdge : 4 * kEdge;
  thread_local std::vector<float> part;
  if (m == 0 || n == 0) return;
  if (k == 0 && !add) {
    for (int64_t i = 0; i < m; ++i) std::fill_n(c + i * ld_c, n, 0.f);
  }
  for (int64_t from = 0; from < k; from += chain) {
    const int64_t terms = std::min(chain, k - from);
    if (from == 0 && !add) {
      one_product(m, n, terms, a, ld_a, b, ld_b, c, ld_c);
      continue;
    }
    part.resize(std::max<size_t>(part.size(), m * n));
    one_product(m, n, terms, a + from, ld_a, b + from * ld_b, ld_b, part.data(), n);
    add_tile_for_isa()(part.data(), m, n, c, ld_c);
  }
}

void finish_row(const Problem& problem, const Sequence& at, int64_t head, int64_t query,
                const Softmax& softmax, const float* sums, const Heads& out, double* lse) {
  const Denominator of(problem, head, softmax);
  lse[problem.row(at, head, query)] = of.base + std::log(of.whole);
  write_row_for_isa()(sums, problem.v.width(), static_cast<float>(of.share),
                      out.row(at.batch, head, at.q_begin + query), out.dtype());
}

namespace {

// Queries [from, end) of a head, and their sums.
class Block {
 public:
  explicit Block(const Problem& problem)
      : problem_(problem),
        width_(problem.q.width()),
        v_width_(problem.v.width()),
        q_(kQueries * padded(width_)),
        scores_(kQueries * kKeys),
        sums_(kQueries * v_width_) {}

  void run(const Sequence& at, int64_t head, int64_t from, int64_t end, const Packed& k,
           const Packed& v, const Heads& out, double* lse) {
    const int64_t rows = end - from, ld = padded(width_);
    read_rows_for_isa()(problem_.q.rows(at.batch, head, at.q_begin + from), rows, width_,
                        padded(rows), q_.data(), ld);
    std::fill(sums_.begin(), sums_.end(), 0.f);
    std::vector<Softmax> softmax(rows);
    const auto [first, last] = problem_.seen(at, from, end);
    for (int64_t key = first / kKeys * kKeys; key < last; key += kKeys) {
      const int64_t n = std::min(kKeys, last - key);
      product(padded(rows), padded(n), width_, q_.data(), ld, k.tile(at, head, key), kKeys,
              scores_.data(), kKeys, false);
      for (int64_t i = 0; i < rows; ++i) {
        const auto row = problem_.scores(at, head, from + i, key, n, scores_.data() + i * kKeys);
        add_scores_for_isa()(row, problem_.map(), softmax[i]);
        if (softmax[i].factor != 1) {
          scale_row_for_isa()(sums_.data() + i * v_width_, v_width_, softmax[i].factor);
        }
      }
      product(padded(rows), v_width_, padded(n), scores_.data(), kKeys, v.tile(at, head, key),
              v_width_, sums_.data(), v_width_, true);
    }
    for (int64_t i = 0; i < rows; ++i) {
      finish_row(problem_, at, head, from + i, softmax[i], sums_.data() + i * v_width_, out, lse);
    }
  }

 private:
  const Problem& problem_;
  int64_t width_, v_width_;
  std::vector<float> q_, scores_, sums_;
};

void forward(const Problem& problem, const Heads& out, double* lse) {
  const Packed k(problem, problem.k, Packed::Layout::transposed);
  const Packed v(problem, problem.v, Packed::Layout::rows);
  struct Task {
    const Sequence* at;
    int64_t head, from;
  };
  std::vector<Task> tasks;
  for (const auto& at : problem.sequences) {
    for (int64_t head = 0; head < problem.q.heads(); ++head) {
      for (int64_t from = 0; from < at.queries; from += kQueries)
        tasks.push_back({&at, head, from});
    }
  }
  at::parallel_for(0, tasks.size(), 1, [&](int64_t begin, int64_t end) {
    Block block(problem);
    for (int64_t i = begin; i < end; ++i) {
      const auto& [at, head, from] = tasks[i];
      block.run(*at, head, from, std::min(from + kQueries, at->queries), k, v, out, lse);
    }
  });
}

OutAndLse attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                            const OptionalTensor& bias, const OptionalTensor& sinks,
                            const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                            const OptionalTensor& seed, c10::SymInt max_q, c10::SymInt max_k,
                            Numbers how, at::IntArrayRef window, bool bottom_right) {
  if (!has_kernel(q)) {
    return attention_composite(q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed, max_q, max_k,
                               how, window, bottom_right);
  }
  const auto outputs = attention_outputs(q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed,
                                         max_q, max_k, how, window, bottom_right);
  const auto& [out, lse] = outputs;
  const Problem problem(q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed,
                        {how, window, bottom_right});
  if (given(cu_seqlens_q)) {  // tokens of no sequence
    out.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
  }
  auto* const lses = lse.mutable_data_ptr<double>();
  // The backward makes the scores again, by the same products, or its probabilities would have
  // another sum.
  const bool trains =
      at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad() ||
                                     (given(bias) && bias->requires_grad()));
  if (!trains && decodes(problem)) {
    decode(problem, Heads(out), lses);
  } else {
    forward(problem, Heads(out), lses);
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) { m.impl("attention_forward", attention_forward); }

}  // namespace fusedops::cpu
