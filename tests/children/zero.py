"""Child script of tests/integrations/test_deepspeed.py: one process per rank.

`python -m children.zero RANK RANKS FILE CASES` in tests/ is one of them. DeepSpeed's ZeRO trains a
patched model by fused AdamW, and one process the unpatched model by torch's.
"""

import os
import sys

import torch
import torch.distributed as dist
from patching.models.experts_cases import build
from patching.models.loss_cases import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops
from fusedops.optim import AdamW
from fusedops.patching import fuse_always

STEPS = 4
LR = 1e-3


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixture():
    return build("qwen3_moe")


def ids(rank, step):
    return torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(9 * step + rank))


def loss_of(model, rank, step):
    return model(input_ids=ids(rank, step), labels=ids(rank, step), use_cache=False).loss


def of_one_process(make):
    """Losses per step and rank, and the trained parameters."""
    model, losses = make(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = [loss_of(model, rank, step) for rank in range(dist.get_world_size())]
        (sum(own) / len(own)).backward()
        optimizer.step()
        losses.append(torch.stack(own).detach())
    return torch.stack(losses), dict(model.named_parameters())


def check(losses, parameters, make):
    wanted, trained = of_one_process(make)
    torch.testing.assert_close(torch.stack(losses), wanted[:, dist.get_rank()], rtol=1e-4, atol=0)
    for name, p in trained.items():
        torch.testing.assert_close(
            parameters[name], p.detach(), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: n + m
        )


def zero(stage, make, patched_after=False):
    import deepspeed

    model = make()
    if not patched_after:
        fusedops.patch(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = AdamW(model.parameters(), lr=LR)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if patched_after:
        fusedops.patch(engine)
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, dist.get_rank(), step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        found = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    check(losses, found, make)


def zero1():
    zero(1, llama)
    zero(1, mixture)


def zero2():
    zero(2, llama)
    zero(2, mixture)


def zero3():
    zero(3, llama)
    zero(3, mixture)
    zero(3, llama, patched_after=True)


def main(rank, ranks, meeting, cases):
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=int(rank), world_size=int(ranks))
    import deepspeed

    deepspeed.init_distributed("gloo")
    with fuse_always():
        for case in cases.split(","):
            print(f"case {case}", flush=True)
            globals()[case]()
            dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # now and then a thread of torch's is still there, and ends the process by an abort


if __name__ == "__main__":
    main(*sys.argv[1:])
