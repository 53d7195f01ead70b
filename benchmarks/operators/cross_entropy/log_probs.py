"""linear_log_probs' benchmark contenders: TRL's functions of logits, TRL's fused head, fusedops.

Compute-bound: three matmuls, four where the backward recomputes the logits. Each contender gives
the log-probabilities and the entropies, and the gradients of both, as GRPO with an entropy bonus
needs them.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import Contender, Operation, Run, find
from benchmarks.operators.cross_entropy.linear import bytes_moved, flops, tensors
from fusedops.references.cross_entropy import linear_log_probs_reference

Outputs = tuple[Tensor, Tensor]


def reference(x: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    found = linear_log_probs_reference(x, weight, target, return_entropy=True, dtype=torch.float32)
    return found[0], found[1]


def trl(x: Tensor, weight: Tensor, target: Tensor) -> Run:
    """Full logits, then TRL's two functions, as its trainers used to compute them."""
    log_softmax = find("trl.trainer.utils", "selective_log_softmax")
    entropy = find("trl.trainer.utils", "entropy_from_logits")

    def run(x: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        logits = F.linear(x, weight).unsqueeze(0)
        found = log_softmax(logits, target.unsqueeze(0)), entropy(logits)
        return found[0].squeeze(0).float(), found[1].squeeze(0).float()

    return partial(run, x, weight, target)


def trl_head(x: Tensor, weight: Tensor, target: Tensor) -> Run:
    """The function behind add_fused_lm_head, in tiles of its own size."""
    function = find("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    size = find("trl.trainer.utils", "_CHUNKED_LOGPROB_CHUNK_SIZE")
    options = 1.0, size, None, 1.0, ("log_probs", "entropy")

    def run(x: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        log_probs, entropy, *_ = function.apply(x, weight, None, target, *options)
        return log_probs, entropy

    return partial(run, x, weight, target)


def fused(x: Tensor, weight: Tensor, target: Tensor) -> Run:
    options = {"return_entropy": True, "dtype": torch.float32}
    return partial(ours.linear_log_probs, x, weight, target, **options)


LOG_PROBS = Operation(
    "linear_log_probs",
    tensors(frozen=False, ignored=0.0),
    reference,
    bytes_moved,
    {"trl": Contender(trl), "trl fused head": Contender(trl_head), "fusedops": Contender(fused)},
    flops,
)
