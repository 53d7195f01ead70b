"""Prints how many bytes of small blocks each forward tensor leaves on malloc's heap until backward.

Its words are names of `profiling.cases.CONFIGS`; each model is unpatched first and then patched. It
needs an environment with TUNABLES: malloc counts the blocks in its caches as in use.
"""

import ctypes
import gc
import json
import sys

import torch
from profiling.cases import CONFIGS, HEADS

from fusedops.patching import patch
from fusedops.profiling.planning.heap import OF_TENSOR
from fusedops.profiling.planning.models import meta_model
from fusedops.profiling.planning.request import Request
from fusedops.profiling.planning.step import run_step
from fusedops.profiling.planning.values import Values

TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
BATCH, LENGTH, VOCABULARY = 1, 16, 512  # tensors so small that all are on the heap
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def in_use() -> int:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    return libc.mallinfo2().uordblks


def chunk(size: int) -> int:
    """The bytes that malloc takes for a block."""
    return -(-(size + 8) // 16) * 16


def bytes_per_tensor(name: str, patched: bool) -> float:
    """Without the blocks of the tensor itself."""
    config = CONFIGS[name]()
    config.vocab_size = VOCABULARY
    asked, values = Request(BATCH, LENGTH, patched=patched), Values()
    planned = run_step(meta_model(config, asked, values), asked, values)
    births = [a for a in planned.allocations if a.bytes and 0 <= a.start < planned.backward]
    alive = [a.bytes for a in births if a.end > planned.backward]
    model = HEADS[name].from_config(config).train()
    if patched:
        patch(model)
    ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH))
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    gc.collect()
    before = in_use()
    loss = model(input_ids=ids, labels=ids).loss
    blocks = in_use() - before - sum(map(chunk, alive)) - len(alive) * sum(map(chunk, OF_TENSOR))
    del loss
    return blocks / len(births)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pairs = [(name, patched) for name in sys.argv[1:] for patched in (False, True)]
    print(json.dumps([bytes_per_tensor(*pair) for pair in pairs]))
