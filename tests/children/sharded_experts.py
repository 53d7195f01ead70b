"""Child script of tests/patching/models/test_experts_training.py: checks fused experts under FSDP2.

`python -m children.sharded_experts RANK RANKS FILE CASES FOLDER` in tests/ is one rank's
process. The unpatched, whole model says what the gradients are.
"""

import sys

import torch
from patching.models.experts_cases import ALONE, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from children.ranks import group
from fusedops.patching import patch

RANKS = 2
NAMES = "qwen3_moe", "gpt_oss"


def mixture(name):
    """Of five experts, so that the ranks' shards differ in size."""
    experts = "num_experts" if name == "qwen3_moe" else "num_local_experts"
    return build(name, **{experts: 5})


def loss_of(model, rank):
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(rank))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def sharded(model):
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fused(model):
    assert patch(model, **ALONE).coverage == {"experts": (2, 2)}
    return model


def check(model, name, rank):
    loss_of(model, rank).backward()
    whole = mixture(name)
    (sum(loss_of(whole, r) for r in range(RANKS)) / RANKS).backward()
    expected = {n: p.grad for n, p in whole.named_parameters()}
    for n, p in model.named_parameters():
        assert isinstance(p.grad, DTensor), n
        torch.testing.assert_close(p.grad.full_tensor(), expected[n], msg=lambda m, n=n: n + m)


def sharded_after_patch(rank):
    for name in NAMES:
        check(sharded(fused(mixture(name))), name, rank)


def sharded_before_patch(rank):
    for name in NAMES:
        check(fused(sharded(mixture(name))), name, rank)


def main(rank, ranks, meeting, cases, folder):
    with group(rank, ranks, meeting):
        for case in cases.split(","):
            globals()[case](int(rank))
            print(case, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
