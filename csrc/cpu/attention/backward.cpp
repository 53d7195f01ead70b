// attention on CPUs, backward: a head of k and v at a time, with the query heads that use it.
//
// A block of queries visits the tiles of keys that it sees twice: first for the products q k^T and
// do v^T, which are kept, and their rows' sums; then for the gradients, with three more products.
// dk and dv of a head are summed transposed, so that a tile of probabilities is a second operand
// without a copy; the sums are float32, in an order that does not depend on the number of threads.
// Memory: packed k, its transpose and v's; and for each thread the sums of a head's dk and dv, and
// the products of a block of queries with all keys.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "csrc/cpu/attention/packed.h"

namespace fusedops::cpu::attention {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The requested gradients; the others are undefined. scores: dbias before it is summed to bias's
// shape, float32 [B, Hq, Sq, Sk].
struct Gradients {
  Tensor q, k, v, scores;
};

// Writes n rows of a head, from row `begin`, from x [n, ld].
void write_rows(const std::vector<float>& x, int64_t ld, int64_t n, int64_t width, const Tensor& to,
                int64_t batch, int64_t head, int64_t begin) {
  const Heads rows(to);
  for (int64_t i = 0; i < n; ++i) {
    write_row_for_isa()(x.data() + i * ld, width, 1, rows.row(batch, head, begin + i),
                        rows.dtype());
  }
}

// out [width, queries] = x [queries, width] transposed, as a first operand.
template <class T>
class Turned {
 public:
  Turned(int64_t width, int64_t queries)
      : width_(width),
        ld_(padded(width)),
        queries_(queries),
        x_(queries * ld_),
        transposed_(x_),
        out_(x_.size()) {}

  const T* of(const RowsOf& rows, int64_t n) {
    read_rows(rows, n, width_, queries_, x_.data(), ld_);
    transpose_for_isa()(x_.data(), ld_, queries_, ld_, transposed_.data(), queries_);
    for (int64_t d = 0; d < width_; ++d) {
      write_row_for_isa()(transposed_.data() + d * queries_, queries_, 1,
                          out_.data() + d * queries_, kDtype<T>);
    }
    return out_.data();
  }

 private:
  int64_t width_, ld_, queries_;
  std::vector<float> x_, transposed_;
  std::vector<T> out_;
};

// The gradients of one head of k and v. T: the operands' type.
template <class T>
class KeyHead {
 public:
  KeyHead(const Problem& problem, const Heads& grad, double* delta, const Gradients& gradients)
      : problem_(problem),
        out_grad_(grad),
        delta_(delta),
        gradients_(gradients),
        width_(problem.q.width()),
        v_width_(problem.v.width()),
        ld_(padded(width_, kColumns<T>)),
        v_ld_(padded(v_width_, kColumns<T>)),
        tile_queries_(problem.tile_queries()),
        tile_keys_(problem.tile_keys()),
        q_(tile_queries_ * ld_),
        grad_(tile_queries_ * v_ld_),
        keys_(problem.k, Layout::rows, tile_keys_),
        keys_transposed_(problem.k, Layout::transposed, tile_keys_),
        values_transposed_(problem.v, Layout::transposed, tile_keys_),
        q_turner_(width_, tile_queries_),
        grad_turner_(v_width_, tile_queries_),
        dq_(tile_queries_ * width_),
        p_(tile_queries_ * tile_keys_),
        da_(p_),
        pairs_(p_) {}

  void run(const Sequence& at, int64_t head) {
    const int64_t group = problem_.group();
    padded_keys_ = padded(at.keys, tile_keys_);
    for (auto* const packed : {&keys_, &keys_transposed_, &values_transposed_}) {
      packed->pack(at, head);
    }
    dk_.assign(padded(width_) * padded_keys_, 0);
    dv_.assign(padded(v_width_) * padded_keys_, 0);
    products_.resize(tile_queries_ * padded_keys_);
    grad_products_.resize(tile_queries_ * padded_keys_);
    for (int64_t q_head = head * group; q_head < (head + 1) * group; ++q_head) {
      for (int64_t from = 0; from < at.queries; from += tile_queries_) {
        add(at, q_head, from, std::min(from + tile_queries_, at.queries));
      }
    }
    write_turned(dk_, width_, gradients_.k, at, head);
    write_turned(dv_, v_width_, gradients_.v, at, head);
  }

 private:
  // Returns one tile [tile_queries_, tile_keys_] of a block's q k^T or do v^T.
  float* tile(std::vector<float>& products, int64_t key) const {
    return products.data() + key * tile_queries_;
  }

  void write_turned(const std::vector<float>& x, int64_t width, const Tensor& to,
                    const Sequence& at, int64_t head) {
    if (!to.defined()) return;
    const int64_t ld = padded(width);
    std::vector<float> rows(tile_keys_ * ld);
    for (int64_t key = 0; key < at.keys; key += tile_keys_) {
      for (int64_t d = 0; d < ld; d += kEdge) {
        transpose_for_isa()(x.data() + d * padded_keys_ + key, padded_keys_, kEdge, tile_keys_,
                            rows.data() + d, ld);
      }
      write_rows(rows, ld, std::min(tile_keys_, at.keys - key), width, to, at.batch, head,
                 at.k_begin + key);
    }
  }

  // Adds the gradients from queries [from, end).
  void add(const Sequence& at, int64_t head, int64_t from, int64_t end) {
    const int64_t rows = end - from;
    const auto q_rows = problem_.q.rows(at.batch, head, at.q_begin + from);
    const auto grad_rows = out_grad_.rows(at.batch, head, at.q_begin + from);
    read_rows(q_rows, rows, width_, padded(rows), q_.data(), ld_);
    read_rows(grad_rows, rows, v_width_, padded(rows), grad_.data(), v_ld_);
    q_turned_ = q_turner_.of(q_rows, rows);
    grad_turned_ = grad_turner_.of(grad_rows, rows);
    std::fill(dq_.begin(), dq_.end(), 0.f);
    const auto [first, last] = problem_.seen(at, from, end);
    const auto each_tile = [&, first = first, last = last](const auto& f) {
      for (int64_t key = first / tile_keys_ * tile_keys_; key < last; key += tile_keys_) {
        f(key, std::min(tile_keys_, last - key));
      }
    };
    softmax_.assign(rows, {});
    products_of_rows_.assign(rows, 0);
    rows_.assign(rows, {});
    each_tile([&](int64_t key, int64_t n) { add_products(at, head, from, rows, key, n); });
    for (int64_t i = 0; i < rows; ++i) {
      const double share = Denominator(problem_, head, softmax_[i]).share;
      double& delta = delta_[problem_.row(at, head, from + i)];
      rows_[i].most = softmax_[i].most;
      rows_[i].share = share;
      rows_[i].grad_lse = -delta;
      rows_[i].weighted = products_of_rows_[i] * share;
      delta += products_of_rows_[i] * share;
    }
    each_tile([&](int64_t key, int64_t n) { add_tile(at, head, from, rows, key, n); });
    if (gradients_.q.defined()) {
      write_rows(dq_, width_, rows, width_, gradients_.q, at.batch, head, at.q_begin + from);
    }
  }

  // q k^T, do v^T, and the sums of each row's softmax and delta. The softmax is recomputed, and
  // delta comes from the probabilities, not from out: dp - delta must be 0 if one key has all the
  // probability, and out is rounded. lse is not used either: near the smallest float32 it loses the
  // logarithm of the number of keys.
  void add_products(const Sequence& at, int64_t head, int64_t from, int64_t rows, int64_t key,
                    int64_t n) {
    auto *const s = tile(products_, key), *const dp = tile(grad_products_, key);
    product(padded(rows), padded(n), terms<T>(width_), q_.data(), ld_, keys_transposed_.tile(key),
            tile_keys_, s, tile_keys_, false);
    product(padded(rows), padded(n), terms<T>(v_width_), grad_.data(), v_ld_,
            values_transposed_.tile(key), tile_keys_, dp, tile_keys_, false);
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = problem_.scores(at, head, from + i, key, n, s + i * tile_keys_);
      add_products_for_isa()(row, problem_.map(), dp + i * tile_keys_, softmax_[i],
                             products_of_rows_[i], kDtype<T>);
    }
  }

  void add_tile(const Sequence& at, int64_t head, int64_t from, int64_t rows, int64_t key,
                int64_t n) {
    const int64_t m = padded(rows), keys = padded(n);
    auto *const s = tile(products_, key), *const dp = tile(grad_products_, key);
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = problem_.scores(at, head, from + i, key, n, s + i * tile_keys_);
      auto& to = rows_[i];
      to.dp = dp + i * tile_keys_;
      if (gradients_.scores.defined()) {
        to.ds = gradients_.scores.mutable_data_ptr<float>() + row.row * problem_.keys + row.key;
      }
      to.p = p_.data() + i * tile_keys_;
      to.da = da_.data() + i * tile_keys_;
      to.dtype = kDtype<T>;
      score_gradients_for_isa()(row, problem_.map(), to);
    }
    std::fill(p_.begin() + rows * tile_keys_, p_.begin() + m * tile_keys_, T(0));
    std::fill(da_.begin() + rows * tile_keys_, da_.begin() + m * tile_keys_, T(0));
    if (gradients_.q.defined()) {
      product(m, width_, keys, da_.data(), tile_keys_, keys_.tile(key), width_, dq_.data(), width_,
              true);
    }
    if (gradients_.v.defined()) {
      product(v_width_, keys, m, grad_turned_, tile_queries_, second(p_, m), tile_keys_,
              dv_.data() + key, padded_keys_, true);
    }
    if (gradients_.k.defined()) {
      product(width_, keys, m, q_turned_, tile_queries_, second(da_, m), tile_keys_,
              dk_.data() + key, padded_keys_, true);
    }
  }

  // A tile's first rows, as a second operand.
  const T* second(const std::vector<T>& tile, int64_t rows) {
    if constexpr (std::is_same_v<T, float>) {
      return tile.data();
    } else {
      read_second({tile.data(), tile_keys_, kDtype<T>}, rows, tile_keys_, rows, pairs_.data());
      return pairs_.data();
    }
  }

  const Problem& problem_;
  const Heads& out_grad_;
  double* delta_;  // of each row; initialised to -dlse
  const Gradients& gradients_;
  int64_t width_, v_width_, ld_, v_ld_, tile_queries_, tile_keys_, padded_keys_ = 0;
  std::vector<T> q_, grad_;
  Packed<T> keys_, keys_transposed_, values_transposed_;
  Turned<T> q_turner_, grad_turner_;
  const T *q_turned_ = nullptr, *grad_turned_ = nullptr;
  std::vector<float> dq_, dk_, dv_;              // dk, dv: [width, padded_keys_]
  std::vector<float> products_, grad_products_;  // a query block's q k^T and do v^T, by tile
  std::vector<T> p_, da_, pairs_;
  std::vector<Softmax> softmax_;  // per row of a block, like the next vector
  std::vector<double> products_of_rows_;
  std::vector<GradientRow> rows_;
};

template <class T>
void backward(const Problem& problem, const Heads& grad, const Tensor& delta,
              const Gradients& gradients) {
  const int64_t heads = problem.k.heads(), tasks = heads * problem.sequences.size();
  auto* const deltas = delta.mutable_data_ptr<double>();
  at::parallel_for(0, tasks, problem.grain(tasks), [&](int64_t begin, int64_t end) {
    const BrgemmScope scope;
    KeyHead<T> head(problem, grad, deltas, gradients);
    for (int64_t i = begin; i < end; ++i) head.run(problem.sequences[i / heads], i % heads);
  });
}

AttentionGradients attention_backward(const AttentionBackwardArguments& a) {
  if (!has_kernel(a.in.q)) return attention_backward_reference(a);
  const auto outputs = attention_backward_outputs(a);
  const auto& [dq, dk, dv, dbias, dsinks] = outputs;
  const auto& lse = a.lse;
  const Problem problem(a.in, a.numbers.options());
  const auto delta = at::zeros(lse.sizes(), lse.options());
  if (is_defined(a.grad_lse)) delta.sub_(*a.grad_lse);
  const auto rows = lse.contiguous();
  Gradients gradients{dq, dk, dv, {}};
  if (dbias.defined()) {
    gradients.scores =
        at::zeros({problem.batches, problem.q.heads(), problem.queries, problem.keys},
                  lse.options().dtype(at::kFloat));
  }
  if (is_defined(a.in.cu_seqlens_q)) {  // for tokens outside every sequence
    for (const auto& t : {dq, dk, dv}) {
      if (t.defined()) t.zero_();
    }
  }
  if (multiplies_bfloat16(a.in.q.scalar_type())) {
    backward<BFloat16>(problem, Heads(a.grad), delta, gradients);
  } else {
    backward<float>(problem, Heads(a.grad), delta, gradients);
  }
  if (dbias.defined()) dbias.copy_(gradients.scores.sum_to_size(dbias.sizes()));
  if (dsinks.defined()) {
    const auto sink_terms = at::exp(problem.sinks.unsqueeze(-1) - rows) * delta;
    dsinks.copy_(-at::where(rows.eq(-kInfinity), 0, sink_terms).sum(at::IntArrayRef({0, 2})));
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) { m.impl("attention_backward", flat<attention_backward>); }

}  // namespace fusedops::cpu::attention
