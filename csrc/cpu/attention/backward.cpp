// attention on CPUs, backward: a head of k and v at a time, with the query heads that have it.
//
// A block of queries goes over the tiles of keys that it sees twice, and makes their scores again:
// two products for delta, then five for the gradients, and two transposes of a tile in the cache. A
// head's dk and dv add up in float32, in one order whatever the number of threads. Memory beside
// the results: packed k, its transpose and v's, and the sums of dk and dv of a head a thread.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "csrc/cpu/attention/packed.h"

namespace fusedops::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The gradients that are wanted; the others are undefined. scores: dbias before it is summed to
// bias's shape, float32 [B, Hq, Sq, Sk].
struct Gradients {
  Tensor q, k, v, scores;
};

struct Operands {
  const Packed &keys, &keys_transposed, &values_transposed;
  const Heads& grad;
  double* delta;  // of each row; begins as -dlse
};

void write_rows(const std::vector<float>& x, int64_t ld, int64_t n, int64_t width, const Tensor& to,
                int64_t batch, int64_t head, int64_t begin) {
  const Heads rows(to);
  for (int64_t i = 0; i < n; ++i) {
    write_row_for_isa()(x.data() + i * ld, width, 1, rows.row(batch, head, begin + i),
                        rows.dtype());
  }
}

// The gradients of one head of k and v.
class KeyHead {
 public:
  KeyHead(const Problem& problem, const Operands& operands, const Gradients& gradients)
      : problem_(problem),
        operands_(operands),
        gradients_(gradients),
        width_(problem.q.width()),
        v_width_(problem.v.width()),
        ld_(padded(width_)),
        v_ld_(padded(v_width_)),
        q_(kQueries * ld_),
        grad_(kQueries * v_ld_),
        dq_(kQueries * width_),
        p_(kQueries * kKeys),
        da_(p_),
        transposed_(p_) {}

  void run(const Sequence& at, int64_t head) {
    const int64_t rows = padded(at.keys, kKeys), group = problem_.group();
    dk_.assign(rows * width_, 0);
    dv_.assign(rows * v_width_, 0);
    for (int64_t of_q = head * group; of_q < (head + 1) * group; ++of_q) {
      for (int64_t from = 0; from < at.queries; from += kQueries) {
        add(at, of_q, from, std::min(from + kQueries, at.queries));
      }
    }
    const auto& [dq, dk, dv, scores] = gradients_;
    if (dk.defined()) write_rows(dk_, width_, at.keys, width_, dk, at.batch, head, at.k_begin);
    if (dv.defined()) write_rows(dv_, v_width_, at.keys, v_width_, dv, at.batch, head, at.k_begin);
  }

 private:
  // Queries [from, end).
  void add(const Sequence& at, int64_t head, int64_t from, int64_t end) {
    const int64_t rows = end - from;
    read_rows_for_isa()(problem_.q.rows(at.batch, head, at.q_begin + from), rows, width_,
                        padded(rows), q_.data(), ld_);
    read_rows_for_isa()(operands_.grad.rows(at.batch, head, at.q_begin + from), rows, v_width_,
                        padded(rows), grad_.data(), v_ld_);
    std::fill(dq_.begin(), dq_.end(), 0.f);
    const auto [first, last] = problem_.seen(at, from, end);
    const auto each_tile = [&, first = first, last = last](const auto& f) {
      for (int64_t key = first / kKeys * kKeys; key < last; key += kKeys) {
        f(key, std::min(kKeys, last - key));
      }
    };
    softmax_.assign(rows, {});
    products_.assign(rows, 0);
    each_tile([&](int64_t key, int64_t n) { add_products(at, head, from, rows, key, n); });
    for (int64_t i = 0; i < rows; ++i) {
      share_[i] = Denominator(problem_, head, softmax_[i]).share;
      operands_.delta[problem_.row(at, head, from + i)] += products_[i] * share_[i];
    }
    each_tile([&](int64_t key, int64_t n) { add_tile(at, head, from, rows, key, n); });
    if (gradients_.q.defined()) {
      write_rows(dq_, width_, rows, width_, gradients_.q, at.batch, head, at.q_begin + from);
    }
  }

  // p_ = q k^T, da_ = do v^T
  void make_products(const Sequence& at, int64_t head, int64_t rows, int64_t key, int64_t n) {
    product(padded(rows), padded(n), width_, q_.data(), ld_,
            operands_.keys_transposed.tile(at, head, key), kKeys, p_.data(), kKeys, false);
    product(padded(rows), padded(n), v_width_, grad_.data(), v_ld_,
            operands_.values_transposed.tile(at, head, key), kKeys, da_.data(), kKeys, false);
  }

  // The softmax again, and delta's products, from the probabilities and not from out: dp - delta
  // has to be 0 where one key has all of them, and out is rounded. An lse of the least float32, as
  // of a row whose keys all have that bias, would not hold the logarithm of their number.
  void add_products(const Sequence& at, int64_t head, int64_t from, int64_t rows, int64_t key,
                    int64_t n) {
    make_products(at, head, rows, key, n);
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = problem_.scores(at, head, from + i, key, n, p_.data() + i * kKeys);
      add_products_for_isa()(row, problem_.map(), da_.data() + i * kKeys, softmax_[i],
                             products_[i]);
    }
  }

  void add_tile(const Sequence& at, int64_t head, int64_t from, int64_t rows, int64_t key,
                int64_t n) {
    const int64_t m = padded(rows), keys = padded(n);
    make_products(at, head, rows, key, n);
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = problem_.scores(at, head, from + i, key, n, p_.data() + i * kKeys);
      float* ds = nullptr;
      if (gradients_.scores.defined()) {
        ds = gradients_.scores.mutable_data_ptr<float>() + row.row * problem_.keys + row.key;
      }
      score_gradients_for_isa()(row, problem_.map(), softmax_[i].most, share_[i],
                                static_cast<float>(operands_.delta[row.row]),
                                da_.data() + i * kKeys, ds);
    }
    std::fill(p_.begin() + rows * kKeys, p_.begin() + m * kKeys, 0.f);
    std::fill(da_.begin() + rows * kKeys, da_.begin() + m * kKeys, 0.f);
    if (gradients_.q.defined()) {
      product(m, width_, keys, da_.data(), kKeys, operands_.keys.tile(at, head, key), width_,
              dq_.data(), width_, true);
    }
    if (gradients_.v.defined()) {
      transpose_for_isa()(p_.data(), kKeys, m, keys, transposed_.data(), kQueries);
      product(keys, v_width_, m, transposed_.data(), kQueries, grad_.data(), v_ld_,
              dv_.data() + key * v_width_, v_width_, true);
    }
    if (gradients_.k.defined()) {
      transpose_for_isa()(da_.data(), kKeys, m, keys, transposed_.data(), kQueries);
      product(keys, width_, m, transposed_.data(), kQueries, q_.data(), ld_,
              dk_.data() + key * width_, width_, true);
    }
  }

  const Problem& problem_;
  const Operands& operands_;
  const Gradients& gradients_;
  int64_t width_, v_width_, ld_, v_ld_;
  std::vector<float> q_, grad_, dq_, p_, da_, transposed_, dk_, dv_;
  std::vector<Softmax> softmax_;  // of a block's rows, as what follows
  std::vector<double> products_;
  std::array<float, kQueries> share_;
};

void backward(const Problem& problem, const Heads& grad, const Tensor& delta,
              const Gradients& gradients) {
  using Layout = Packed::Layout;
  const Packed keys(problem, problem.k, Layout::rows);
  const Packed keys_transposed(problem, problem.k, Layout::transposed);
  const Packed values_transposed(problem, problem.v, Layout::transposed);
  const Operands operands{keys, keys_transposed, values_transposed, grad,
                          delta.mutable_data_ptr<double>()};
  const int64_t heads = problem.k.heads(), tasks = heads * problem.sequences.size();
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    KeyHead head(problem, operands, gradients);
    for (int64_t i = begin; i < end; ++i) head.run(problem.sequences[i / heads], i % heads);
  });
}

AttentionGradients attention_backward(const Tensor& grad, const OptionalTensor& grad_lse,
                                      const Tensor& q, const Tensor& k, const Tensor& v,
                                      const OptionalTensor& bias, const OptionalTensor& sinks,
                                      const OptionalTensor& cu_seqlens_q,
                                      const OptionalTensor& cu_seqlens_k,
                                      const OptionalTensor& seed, const Tensor& out,
                                      const Tensor& lse, c10::SymInt max_q, c10::SymInt max_k,
                                      Numbers how, at::IntArrayRef window, bool bottom_right,
                                      std::array<bool, 5> output_mask) {
  if (!has_kernel(q)) {
    return attention_backward_composite(grad, grad_lse, q, k, v, bias, sinks, cu_seqlens_q,
                                        cu_seqlens_k, seed, out, lse, max_q, max_k, how, window,
                                        bottom_right, output_mask);
  }
  const auto outputs = attention_backward_outputs(grad, grad_lse, q, k, v, bias, sinks,
                                                  cu_seqlens_q, cu_seqlens_k, seed, out, lse, max_q,
                                                  max_k, how, window, bottom_right, output_mask);
  const auto& [dq, dk, dv, dbias, dsinks] = outputs;
  const Problem problem(q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed,
                        {how, window, bottom_right});
  const auto delta = at::zeros(lse.sizes(), lse.options());
  if (given(grad_lse)) delta.sub_(*grad_lse);
  const auto rows = lse.contiguous();
  Gradients gradients{dq, dk, dv, {}};
  if (dbias.defined()) {
    gradients.scores =
        at::zeros({problem.batches, problem.q.heads(), problem.queries, problem.keys},
                  lse.options().dtype(at::kFloat));
  }
  if (given(cu_seqlens_q)) {  // tokens of no sequence
    for (const auto& t : {dq, dk, dv}) {
      if (t.defined()) t.zero_();
    }
  }
  backward(problem, Heads(grad), delta, gradients);
  if (dbias.defined()) dbias.copy_(gradients.scores.sum_to_size(dbias.sizes()));
  if (dsinks.defined()) {
    const auto of_sink = at::exp(problem.sinks.unsqueeze(-1) - rows) * delta;
    dsinks.copy_(-at::where(rows.eq(-kInfinity), 0, of_sink).sum({0, 2}));
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) { m.impl("attention_backward", attention_backward); }

}  // namespace fusedops::cpu
