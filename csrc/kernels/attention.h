// Shared by attention's operators and CPU kernels: the formulas and the window. Shapes:
// fusedops/functional/attention.py. Plain C++.
//
// Row i of a head's scores, over keys j, with a = scale q_i k_j:
//   s_ij = softcap tanh(a / softcap) + bias_ij, or a + bias_ij, if i sees j; else -infinity
//   lse_i = log(sum_j exp(s_ij) + exp(sink)),  p_ij = exp(s_ij - lse_i)
//   out_i = sum_j p_ij d_ij v_j                      d: 1, or with dropout 0 or 1 / (1 - p)
//   ds_ij = p_ij (d_ij do_i v_j - delta_i),  delta_i = do_i out_i - dlse_i
//   da_ij = ds_ij (1 - (softcap tanh / softcap)^2),  dq_i = scale sum_j da_ij k_j,  dk_j likewise
//   dsink = -sum_i exp(sink - lse_i) delta_i
// i sees j if i + offset - left <= j <= i + offset + right; a limit of -1 is open. The offset is
// keys - queries if the last query sees the last key, otherwise 0.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fusedops::attention {

// Which keys a query sees.
struct Window {
  int64_t left, right, offset;

  // The first key that `query` sees.
  int64_t first(int64_t query) const {
    return left < 0 ? 0 : std::max<int64_t>(0, query + offset - left);
  }
  // One past the last key that `query` sees, among `keys` keys.
  int64_t end(int64_t query, int64_t keys) const {
    return right < 0 ? keys : std::clamp<int64_t>(query + offset + right + 1, 0, keys);
  }
};

}  // namespace fusedops::attention
