"""Who else has a rotary embedding for GPUs. One that is not installed is left out.

Liger rotates heads that lie inside the sequence, and in place: of the other layout it makes copies,
and these are in its time.
"""

from functools import partial

from torch import Tensor

from benchmarks.harness.case import Contender, Run, find


def liger(*inputs: Tensor) -> Run:
    return partial(find("liger_kernel.ops.rope", "LigerRopeFunction").apply, *inputs)


PEERS: dict[str, dict[str, Contender]] = {"rotary_embedding": {"liger": Contender(liger)}}
