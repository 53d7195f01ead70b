"""Child script: trains a small Llama on two ranks; prints a rank's peak memory.

python rank_memory.py ddp|zero1|fsdp|qlora store_file [checkpoint]
"""

import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
import transformers

import fusedops
from fusedops.measuring.memory.allocations import peak_of
from fusedops.measuring.memory.profiled import profiled_allocations

sys.path.insert(0, str(Path(__file__).parents[1]))
from profiling.cases import model_of, tokens, training_step

from children.ranks import group

WORLD, STEPS = 2, 3


def work(rank, strategy, store, *checkpoint):
    transformers.logging.set_verbosity_error()
    with group(rank, WORLD, store):
        peak = peak_of(profiled_allocations(lambda _: train(strategy, checkpoint)))[1]
        if rank == 0:
            print(peak, flush=True)


def train(strategy, checkpoint):
    """From before the model is made, so that every allocation is seen."""
    torch.manual_seed(0)
    model = model_of("llama")
    if checkpoint:
        model.gradient_checkpointing_enable()
    wrapped, optimizer = WRAPPED[strategy](model)
    step = training_step(wrapped, optimizer, tokens(), tokens())
    for _ in range(STEPS):
        step()


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model), torch.optim.AdamW(model.parameters())


def zero1(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)


def fsdp(model):
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def qlora(model):
    """Adapters over frozen codes, all of them sharded."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    fusedops.quantize(model, "nf4")
    model = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear"))
    fusedops.nn.codes_as_parameters(model)
    for block in model.get_base_model().model.layers:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


LORA_RANK = 4
WRAPPED = {"ddp": ddp, "zero1": zero1, "fsdp": fsdp, "qlora": qlora}

if __name__ == "__main__":
    mp.start_processes(work, tuple(sys.argv[1:]), nprocs=WORLD, start_method="fork")
