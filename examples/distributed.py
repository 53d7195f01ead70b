"""Data-parallel training on two processes: DistributedDataParallel with a patched model.

    python examples/distributed.py          # a Llama of 10.8M parameters; a minute
    python examples/distributed.py --tiny   # seconds
    torchrun --nproc-per-node 2 examples/distributed.py --tiny

Each process patches its own copy of the model before DDP wraps it. Expect a falling loss, and
parameters that are equal bit for bit on both processes at the end.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH = (8, 2, 64) if TINY else (60, 2, 256)
HIDDEN, LAYERS = (64, 2) if TINY else (384, 6)
WORLD = 2


def train(rank):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    report = fusedops.patch(model)
    model = DistributedDataParallel(model)
    optimizer = fusedops.optim.AdamW8bit(model.parameters(), lr=4e-4, max_grad_norm=1.0)
    if rank == 0:
        print(report.summary)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    random = torch.Generator().manual_seed(rank)  # each process reads other pieces
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
        tokens = text[starts + torch.arange(LENGTH)].long()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0 and (step % (STEPS // 4) == 0 or step == STEPS - 1):
            print(f"step {step:3}  loss {loss.item() / dist.get_world_size():.3f}")

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    if rank == 0:
        print("parameters equal on all processes:", all(torch.equal(flat, t) for t in gathered))


def main(rank, store, world=WORLD):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    train(dist.get_rank())  # its model is gone before the group is: DDP holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started us
        main(-1, "env://", -1)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(main, (f"file://{folder}/store",), nprocs=WORLD)
