"""QLoRA on two processes: FSDP2 shards the frozen 4-bit weights over them.

    python examples/qlora_fsdp.py          # starts two processes itself; about two minutes
    python examples/qlora_fsdp.py --tiny   # seconds
    torchrun --nproc-per-node 2 examples/qlora_fsdp.py --tiny

Each process keeps half of the codes, and gathers a layer's while the layer runs. Expect half of the
frozen bytes on each process, and a falling loss.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH, HIDDEN, LAYERS = (12, 2, 64, 64, 2) if TINY else (60, 2, 256, 384, 6)
SOURCE = b"".join(f.read_bytes() for f in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
WORLD = 2


def held(model):
    """Bytes of the frozen parameters on this process."""
    frozen = (p for p in model.parameters() if not p.requires_grad)
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in frozen)


def train(rank):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 64,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    fusedops.quantize(base, "nf4")
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    fusedops.patch(model)
    fusedops.nn.codes_as_parameters(model)
    before = held(model)
    for module in (*base.model.layers, model):
        fully_shard(module)
    if rank == 0:
        print(f"frozen: {before / 1e6:.2f} MB; each process holds {held(model) / 1e6:.2f} MB")
    optimizer = fusedops.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    text = torch.frombuffer(bytearray(SOURCE), dtype=torch.uint8)
    random = torch.Generator().manual_seed(rank)  # each process reads other pieces
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
        tokens = text[starts + torch.arange(LENGTH)].long()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % (STEPS // 4) == 0 or step == STEPS - 1):
            print(f"step {step:3}  loss {loss.item():.3f}")


def main(rank, store, world=WORLD):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    train(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started us
        main(-1, "env://", -1)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(main, (f"file://{folder}/store",), nprocs=WORLD)
