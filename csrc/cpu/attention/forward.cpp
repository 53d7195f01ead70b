// Attention's forward on CPUs, with or without a key-value cache. Few queries go to decode.cpp.
//
// K and V are packed once per head, K transposed, in tiles of kKeys keys. A block of kQueries
// queries visits each tile that one of them sees: a product, the softmax's row loops in the
// cache, and a product into the block's sums. A head takes 4 S^2 D operations and S^2
// exponentials, half of both with `causal`. Each thread needs memory for the packed K and V of
// a head and for a tile of scores.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <iterator>

#include "csrc/cpu/attention/heads.h"
#include "csrc/cpu/attention/packed.h"

namespace fusedops::cpu::attention {

void finish_row(const Problem& problem, const Sequence& at, int64_t head, int64_t query,
                const Softmax& softmax, const float* sums, const Heads& out, double* lse) {
  const Denominator of(problem, head, softmax);
  lse[problem.row(at, head, query)] = of.base + std::log(of.whole);
  write_row_for_isa()(sums, problem.v.width(), static_cast<float>(of.share),
                      out.row(at.batch, head, at.q_begin + query), out.dtype());
}

namespace {

// Queries [from, end) of a head and their sums. T: the operands' type.
template <class T>
class Block {
 public:
  explicit Block(const Problem& problem)
      : problem_(problem),
        width_(problem.q.width()),
        v_width_(problem.v.width()),
        ld_(padded(width_, kColumns<T>)),
        tile_keys_(problem.tile_keys()),
        q_(problem.tile_queries() * ld_),
        scores_(problem.tile_queries() * tile_keys_),
        sums_(problem.tile_queries() * v_width_) {
    if (!std::is_same_v<T, float>) p_.resize(scores_.size());
  }

  void run(const Sequence& at, int64_t head, int64_t from, int64_t end, const Packed<T>& k,
           const Packed<T>& v, const Heads& out, double* lse) {
    const int64_t rows = end - from;
    read_rows(problem_.q.rows(at.batch, head, at.q_begin + from), rows, width_, padded(rows),
              q_.data(), ld_);
    std::fill(sums_.begin(), sums_.end(), 0.f);
    softmax_.assign(rows, {});
    const auto [first, last] = problem_.seen(at, from, end);
    for (int64_t key = first / tile_keys_ * tile_keys_; key < last; key += tile_keys_) {
      const int64_t n = std::min(tile_keys_, last - key);
      product(padded(rows), padded(n), terms<T>(width_), q_.data(), ld_, k.tile(key), tile_keys_,
              scores_.data(), tile_keys_, false);
      for (int64_t i = 0; i < rows; ++i) {
        const auto row =
            problem_.scores(at, head, from + i, key, n, scores_.data() + i * tile_keys_);
        add_scores_for_isa()(row, problem_.map(), softmax_[i], p() + i * tile_keys_, kDtype<T>);
        if (softmax_[i].factor != 1) {
          scale_row_for_isa()(sums_.data() + i * v_width_, v_width_, softmax_[i].factor);
        }
      }
      product(padded(rows), v_width_, padded(n), p(), tile_keys_, v.tile(key), v_width_,
              sums_.data(), v_width_, true);
    }
    for (int64_t i = 0; i < rows; ++i) {
      finish_row(problem_, at, head, from + i, softmax_[i], sums_.data() + i * v_width_, out, lse);
    }
  }

 private:
  T* p() {
    if constexpr (std::is_same_v<T, float>) return scores_.data();
    return p_.data();
  }

  const Problem& problem_;
  int64_t width_, v_width_, ld_, tile_keys_;
  std::vector<T> q_, p_;
  std::vector<float> scores_, sums_;
  std::vector<Softmax> softmax_;
};

// The packed keys and values of one head.
template <class T>
struct PackedPair {
  Packed<T> k, v;

  explicit PackedPair(const Problem& problem)
      : k(problem.k, Layout::transposed, problem.tile_keys()),
        v(problem.v, Layout::rows, problem.tile_keys()) {}

  void pack(const Sequence& at, int64_t head) {
    k.pack(at, head);
    v.pack(at, head);
  }
};

// A head of k and v with the query blocks that use it. If heads give threads equal shares, a thread
// takes a head with its blocks; else the heads are packed first and threads take blocks.
template <class T>
void forward(const Problem& problem, const Heads& out, double* lse) {
  const int64_t heads = problem.k.heads(), group = problem.group(),
                pairs = heads * problem.sequences.size();
  const auto each_block = [&](const Sequence& at, int64_t head, const auto& f) {
    for (int64_t q_head = head * group; q_head < (head + 1) * group; ++q_head) {
      for (int64_t from = 0; from < at.queries; from += kQueries) f(q_head, from);
    }
  };
  const auto run = [&](Block<T>& block, const PackedPair<T>& of, const Sequence& at, int64_t head,
                       int64_t from) {
    block.run(at, head, from, std::min(from + kQueries, at.queries), of.k, of.v, out, lse);
  };
  const int64_t threads = at::get_num_threads();
  if (pairs % threads == 0 || pairs >= 4 * threads) {
    at::parallel_for(0, pairs, problem.grain(pairs), [&](int64_t begin, int64_t end) {
      const BrgemmScope scope;
      Block<T> block(problem);
      PackedPair<T> packed(problem);
      for (int64_t i = begin; i < end; ++i) {
        const auto& at = problem.sequences[i / heads];
        packed.pack(at, i % heads);
        each_block(at, i % heads,
                   [&](int64_t q_head, int64_t from) { run(block, packed, at, q_head, from); });
      }
    });
    return;
  }
  struct Task {
    int64_t pair, head, from;
  };
  std::vector<Task> tasks;
  std::vector<PackedPair<T>> packed(pairs, PackedPair<T>(problem));
  for (int64_t i = 0; i < pairs; ++i) {
    const auto& at = problem.sequences[i / heads];
    each_block(at, i % heads,
               [&](int64_t q_head, int64_t from) { tasks.push_back({i, q_head, from}); });
  }
  at::parallel_for(0, pairs, problem.grain(pairs), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) packed[i].pack(problem.sequences[i / heads], i % heads);
  });
  at::parallel_for(0, tasks.size(), problem.grain(tasks.size()), [&](int64_t begin, int64_t end) {
    const BrgemmScope scope;
    Block<T> block(problem);
    for (int64_t i = begin; i < end; ++i) {
      const auto& [pair, head, from] = tasks[i];
      run(block, packed[pair], problem.sequences[pair / heads], head, from);
    }
  });
}

// Fills tokens outside every sequence.
void clear(const Tensor& out, const Tensor& lse) {
  out.zero_();
  lse.fill_(-std::numeric_limits<float>::infinity());
}

void fill(const Problem& problem, bool few, const Tensor& out, const Tensor& lse) {
  auto* const lses = lse.mutable_data_ptr<double>();
  if (few) {
    decode(problem, Heads(out), lses);
  } else if (multiplies_bfloat16(out.scalar_type())) {
    forward<BFloat16>(problem, Heads(out), lses);
  } else {
    forward<float>(problem, Heads(out), lses);
  }
}

OutAndLse attention_forward(const AttentionArguments& a) {
  if (!has_kernel(a.in.q)) return attention_forward_reference(a);
  const auto outputs = attention_outputs(a);
  const auto& [out, lse] = outputs;
  const Problem problem(a.in, a.numbers.options());
  if (is_defined(a.in.cu_seqlens_q)) clear(out, lse);
  const bool few = std::all_of(problem.sequences.begin(), problem.sequences.end(),
                               [&](const Sequence& at) { return decodes(problem, at); });
  fill(problem, few, out, lse);
  return outputs;
}

// Serving mixes steps of few queries with prompts: each sequence takes its own path.
OutAndLse cached_attention_forward(const CachedAttentionArguments& a) {
  if (!has_kernel(a.in.q)) return cached_attention_forward_reference(a);
  const auto outputs = cached_attention_outputs(a);
  const auto& [out, lse] = outputs;
  Problem problem(a.in, a.options());
  if (is_defined(a.in.cu_seqlens_q)) clear(out, lse);
  const auto all = std::move(problem.sequences);
  for (const bool few : {true, false}) {
    problem.sequences.clear();
    std::copy_if(all.begin(), all.end(), std::back_inserter(problem.sequences),
                 [&](const Sequence& at) { return decodes(problem, at) == few; });
    fill(problem, few, out, lse);
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("attention_forward", flat<attention_forward>);
  m.impl("cached_attention_forward", flat<cached_attention_forward>);
}

}  // namespace fusedops::cpu::attention
