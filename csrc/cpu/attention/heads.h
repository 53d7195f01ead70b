// Describes a call to attention's CPU loops: its sequences, and the rows of each head.
#pragma once

#include <ATen/Functions.h>

#include <vector>

#include "csrc/cpu/isa/attention/scores.h"
#include "csrc/cpu/gemm.h"
#include "csrc/ops/attention/cached.h"
#include "csrc/ops/seed.h"

namespace fusedops::cpu::attention {

constexpr int64_t kQueries = 64;     // the most in a block
constexpr int64_t kShare = 1 << 16;  // least number of multiplications of a thread

// Queries and keys that see each other: a batch entry, or one of several concatenated sequences.
// blocks: the blocks of a paged cache that hold the keys in order, or null.
struct Sequence {
  int64_t batch, q_begin, queries, k_begin, keys;
  Window window;
  int64_t k_batch = batch;
  const int64_t* blocks = nullptr;
};

// [B, H, S, D] whose rows D are contiguous; copied if they are not.
class Heads {
 public:
  explicit Heads(const Tensor& t) : t_(t.size(3) <= 1 || t.stride(3) == 1 ? t : t.contiguous()) {}

  int64_t heads() const { return t_.size(1); }
  int64_t width() const { return t_.size(3); }
  int64_t bytes() const { return t_.element_size(); }
  Dtype dtype() const { return dtype_of(t_); }

  // Returns a head's rows from row i.
  RowsOf rows(int64_t batch, int64_t head, int64_t i) const {
    return {static_cast<const char*>(t_.const_data_ptr()) + bytes_to(batch, head, i), t_.stride(2),
            dtype()};
  }

  // Returns a sequence's keys or values from `key` on, if they are not in a paged cache.
  RowsOf keys(const Sequence& at, int64_t head, int64_t key) const {
    return rows(at.k_batch, head, at.k_begin + key);
  }

  // Writes the addresses of n keys or values in a paged cache, [blocks, H, block_size, D].
  void find(const Sequence& at, int64_t head, int64_t key, int64_t n, const void** to) const {
    const int64_t size = t_.size(2), step = t_.stride(2) * t_.element_size();
    int64_t block = key / size, row = key % size;
    for (int64_t i = 0; i < n; ++block, row = 0) {
      const auto* of =
          static_cast<const char*>(t_.const_data_ptr()) + bytes_to(at.blocks[block], head, row);
      for (const int64_t end = std::min(n, i + size - row); i < end; ++i, of += step) to[i] = of;
    }
  }

  void* row(int64_t batch, int64_t head, int64_t i) const {
    return static_cast<char*>(t_.mutable_data_ptr()) + bytes_to(batch, head, i);
  }

 private:
  int64_t bytes_to(int64_t batch, int64_t head, int64_t i) const {
    return (batch * t_.stride(0) + head * t_.stride(1) + i * t_.stride(2)) * t_.element_size();
  }

  Tensor t_;
};

struct Problem {
  AttentionOptions options;
  Heads q, k, v;
  Tensor bias;    // expanded to the scores' shape, or undefined
  Tensor sinks;   // float32, or undefined
  Tensor blocks;  // a paged cache's table, int64, or undefined
  Dropout dropout;
  std::vector<Sequence> sequences;
  int64_t batches, queries, keys;  // queries: the row length of lse

  Problem(const AttentionInputs& in, const AttentionOptions& options_)
      : options(options_),
        q(in.q),
        k(in.k),
        v(in.v),
        sinks(in_float32(in.sinks)),
        dropout(dropout_of(options.dropout_p, in.seed)),
        batches(in.q.size(0)),
        queries(in.q.size(2)),
        keys(in.k.size(2)) {
    if (is_defined(in.bias)) bias = in.bias->expand({batches, q.heads(), queries, keys});
    if (is_defined(in.cu_seqlens_q)) {
      add_sequences(in.cu_seqlens_q->to(at::kLong).contiguous(),
                    in.cu_seqlens_k->to(at::kLong).contiguous());
    } else {
      for (int64_t b = 0; b < batches; ++b) {
        sequences.push_back({b, 0, queries, 0, keys, options.of(queries, keys)});
      }
    }
  }

  Problem(const CacheInputs& in, const AttentionOptions& options_)
      : options(options_),
        q(in.q),
        k(in.k),
        v(in.v),
        sinks(in_float32(in.sinks)),
        dropout{},
        batches(in.q.size(0)),
        queries(in.q.size(2)),
        keys(0) {
    const bool packed = is_defined(in.cu_seqlens_q), paged = is_defined(in.block_table);
    const auto cu_q = packed ? in.cu_seqlens_q->to(at::kLong).contiguous() : Tensor();
    const auto used = in.seqused_k.to(at::kLong).contiguous();
    if (paged) blocks = in.block_table->to(at::kLong).contiguous();
    const auto* const starts = packed ? cu_q.const_data_ptr<int64_t>() : nullptr;
    for (int64_t i = 0; i < used.numel(); ++i) {
      const int64_t q_length = packed ? starts[i + 1] - starts[i] : queries;
      const int64_t k_length = used.const_data_ptr<int64_t>()[i];
      sequences.push_back(
          {packed ? 0 : i, packed ? starts[i] : 0, q_length, 0, k_length,
           options.of(q_length, k_length), i,
           paged ? blocks.const_data_ptr<int64_t>() + i * blocks.size(1) : nullptr});
    }
  }

  int64_t group() const { return q.heads() / std::max<int64_t>(k.heads(), 1); }
  ScoreMap map() const {
    return {static_cast<float>(options.scale), static_cast<float>(options.softcap)};
  }
  // Sides of a tile of scores: small problems have small tiles, whose memory is soon filled.
  int64_t tile_queries() const { return side(kQueries, &Sequence::queries); }
  int64_t tile_keys() const { return side(kKeys, &Sequence::keys); }
  // How many of all tasks are enough for a thread.
  int64_t grain(int64_t tasks) const {
    int64_t products = 0;
    for (const auto& at : sequences) products += at.queries * at.keys;
    products *= q.heads() * (q.width() + v.width());
    return tasks * kShare / std::max<int64_t>(products, 1) + 1;
  }
  float sink(int64_t head) const { return sinks.const_data_ptr<float>()[head]; }

  // Returns a query's index in lse and in other per-query arrays.
  int64_t row(const Sequence& s, int64_t head, int64_t query) const {
    return (s.batch * q.heads() + head) * queries + s.q_begin + query;
  }

  // The scores of a query with n of its sequence's keys, from `key` on.
  ScoreRow scores(const Sequence& at, int64_t head, int64_t query, int64_t key, int64_t n,
                  float* s) const {
    ScoreRow row{s, n};
    row.begin = std::clamp<int64_t>(at.window.first(query) - key, 0, n);
    row.end = std::clamp<int64_t>(at.window.end(query, at.keys) - key, row.begin, n);
    row.kind = BiasKind::none;
    if (bias.defined()) {
      const bool boolean = bias.scalar_type() == at::kBool;
      row.kind = boolean ? BiasKind::boolean : BiasKind::number;
      const int64_t to = at.batch * bias.stride(0) + head * bias.stride(1) +
                         (at.q_begin + query) * bias.stride(2) +
                         (at.k_begin + key) * bias.stride(3);
      row.bias = {static_cast<const char*>(bias.const_data_ptr()) + to * bias.element_size(),
                  bias.stride(3), boolean ? Dtype::float32 : dtype_of(bias)};
    }
    row.dropout = dropout;
    row.row = this->row(at, head, query);
    row.key = at.k_begin + key;
    return row;
  }

  // The union of the keys that queries [from, end) see.
  std::pair<int64_t, int64_t> seen(const Sequence& at, int64_t from, int64_t end) const {
    const int64_t first = at.window.first(from), last = at.window.end(end - 1, at.keys);
    return {std::min(first, at.keys), std::max(first, last)};
  }

 private:
  int64_t side(int64_t most, int64_t Sequence::* length) const {
    int64_t longest = 1;
    for (const auto& at : sequences) longest = std::max(longest, at.*length);
    return std::min(most, padded(longest));
  }

  static Tensor in_float32(const OptionalTensor& t) {
    return is_defined(t) ? t->to(at::kFloat).contiguous() : Tensor();
  }

  void add_sequences(const Tensor& cu_q, const Tensor& cu_k) {
    const auto* const q_at = cu_q.const_data_ptr<int64_t>();
    const auto* const k_at = cu_k.const_data_ptr<int64_t>();
    for (int64_t i = 0; i + 1 < cu_q.numel(); ++i) {
      const int64_t q_length = q_at[i + 1] - q_at[i], k_length = k_at[i + 1] - k_at[i];
      sequences.push_back(
          {0, q_at[i], q_length, k_at[i], k_length, options.of(q_length, k_length)});
    }
  }
};

inline bool has_kernel(const Tensor& q) {
  return isa() != Isa::none && q.scalar_type() != at::kDouble;
}

// decode.cpp: the forward for a few queries per head, called by forward.cpp.
void decode(const Problem& problem, const Heads& out, double* lse);
bool decodes(const Problem& problem, const Sequence& at);

// A row's sum of exponentials with the sink, which is whole times e to the base. share: the factor
// that makes exp(score - most) a probability.
struct Denominator {
  double base, whole, share;

  Denominator(const Problem& problem, int64_t head, const Softmax& softmax)
      : base(softmax.most), whole(softmax.sum) {
    if (problem.sinks.defined()) {
      const double sink = problem.sink(head);
      base = std::max<double>(softmax.most, sink);
      whole = softmax.sum * std::exp(softmax.most - base) + std::exp(sink - base);
    }
    share = softmax.sum == 0 ? 0 : std::exp(softmax.most - base) / whole;
  }
};

// Finishes a row's sum over its keys: writes out's row and lse.
void finish_row(const Problem& problem, const Sequence& at, int64_t head, int64_t query,
                const Softmax& softmax, const float* sums, const Heads& out, double* lse);

}  // namespace fusedops::cpu::attention
