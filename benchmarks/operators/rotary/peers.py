"""Liger's rotary embedding as a GPU benchmark contender; skipped if Liger is missing.

Liger rotates in place, and needs heads inside the sequence. For the other layout it makes copies,
which are part of its time.
"""

from functools import partial

from torch import Tensor

from benchmarks.harness.case import Contender, Run, find


def liger(*inputs: Tensor) -> Run:
    return partial(find("liger_kernel.ops.rope", "LigerRopeFunction").apply, *inputs)


PEERS: dict[str, dict[str, Contender]] = {"rotary_embedding": {"liger": Contender(liger)}}
