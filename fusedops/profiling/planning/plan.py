"""`fusedops.memory`: predicts a step's memory per rank without running the step."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusedops.measuring.memory.allocations import (
    CATEGORIES,
    TEMPORARIES,
    Allocation,
    by_module,
    held_at,
    largest,
    peak_of,
)
from fusedops.measuring.memory.memory_use import StepBytes
from fusedops.profiling.planning.models import meta_model
from fusedops.profiling.planning.optimizers import ParameterStep, optimizer_steps
from fusedops.profiling.planning.process import heap_bytes, library_bytes
from fusedops.profiling.planning.ranks import Sharding
from fusedops.profiling.planning.request import Request
from fusedops.profiling.planning.step import FakeStep, run_step
from fusedops.profiling.planning.values import Values

__all__ = ["MemoryPlan", "memory", "plans"]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(StepBytes):
    """The predicted bytes per rank of one step.

    gradients has DDP's buckets too, and temporaries the parameters gathered from other ranks.

    Of one rank on a CPU there is also what `top` shows. libraries: what the process holds without
    the step's tensors: what this process held when the model was planned, less the tensors of a
    given model, and 24 MiB of code that the first step loads. allocator: what malloc's heap
    takes more than the tensors at most, as it keeps freed memory. resident: both with the peak.
    None for several ranks, and where they are not known.
    """

    libraries: int | None = field(default=None, compare=False)
    allocator: int | None = field(default=None, compare=False)
    resident: int | None = field(default=None, compare=False)


def memory(
    model_or_config: Any,
    *,
    batch: int | Mapping[str, Any],
    length: int | None = None,
    mode: str = "train",
    optimizer: str | None = "adamw",
    dtype: torch.dtype | str | None = None,
    checkpoint: bool = False,
    patched: bool = False,
    quantize: str | None = None,
    lora_rank: int | None = None,
    world: int = 1,
    strategy: str = "ddp",
) -> MemoryPlan:
    """Predicts the bytes per rank of a step, without running it and without weights.

    The model runs on the meta device: shapes, autograd, checkpointing and hooks are the real ones,
    and each storage is followed from its allocation to its end. Memory that an operator takes and
    gives back inside one call is not seen.

    model_or_config: a module (left as it is), a config of transformers, or a name: a folder, a
    config.json, a model type ("llama"), or a model in the local cache of the Hugging Face hub.
    Nothing is downloaded. batch, length: sequences per rank, and tokens of each, without padding;
    an encoder-decoder gets as many on both sides, and an image model ignores length. batch may also
    be a dict of what the model's forward takes, in tensors on any device: for sounds, for texts
    with images, for masks. length is None then.

    - mode: "train" is a step after the first: forward with labels, backward, optimizer, gradients
      set to None; the outputs are dropped before backward. "forward" is a forward without
      gradients. "generate" reads length - 1 tokens, then one more with the KV cache.
    - optimizer: "adamw" (torch.optim.AdamW), "adamw8bit" (fusedops.optim.AdamW8bit), "sgd" (without
      momentum) or None.
    - dtype: of the parameters; None is the model's or the config's own.
    - checkpoint: activation checkpointing of each block, as transformers does it.
    - patched: with `fusedops.patch(model)`.
    - quantize: a format of `fusedops.quantize`, which runs first. lora_rank: adapters of peft on
      all linears but the head; only they get gradients.
    - world, strategy: the ranks, and "ddp", "zero1", "zero2", "zero3" or "fsdp". See
      `fusedops.profiling.planning.ranks` for the formulas. "fsdp" shards quantized codes too, as
      after `fusedops.nn.codes_as_parameters`; the others keep them whole on each rank.

    Raises TypeError or ValueError with the argument, what was wanted and what came, and
    RuntimeError with the model's line if the model raises, or reads numbers that depend on weights.
    """
    asked = Request(
        batch,
        length,
        mode,
        optimizer,
        dtype,
        checkpoint,
        patched,
        quantize,
        lora_rank,
        world,
        strategy,
    )
    return plans(model_or_config, asked, [world])[0]


def plans(model_or_config: Any, asked: Request, worlds: Sequence[int]) -> list[MemoryPlan]:
    """A plan for each number of ranks, from one run on meta."""
    requests = [dataclasses.replace(asked, world=world) for world in worlds]
    values = Values()
    model = meta_model(model_or_config, asked, values)
    libraries = library_bytes(model_or_config)
    run = run_step(model, asked, values)
    return [_plan(model, run, request, libraries) for request in requests]


def _plan(model: nn.Module, run: FakeStep, asked: Request, libraries: int | None) -> MemoryPlan:
    sharding = Sharding(model, asked.world, asked.strategy)
    allocations = sharding.allocations(model, run)
    parameters = [p for p in model.parameters() if asked.trains and p.grad is not None]
    optimizer = [*optimizer_steps(asked.optimizer, parameters, sharding)]
    heap = heap_bytes(run, optimizer) if asked.world == 1 and libraries is not None else None
    allocations = [*allocations, *_optimizer_allocations(optimizer, run)]
    time, peak = peak_of(allocations)
    process = {}
    if heap is not None and libraries is not None:
        allocator = max(heap - peak, 0)
        process = {"libraries": libraries, "allocator": allocator}
        process["resident"] = sum((peak, libraries, allocator))
    at_peak = held_at(allocations, time)
    return MemoryPlan(
        title=_title(model, asked),
        frozen=sum(sharding.nbytes(p) for p in model.parameters() if not p.requires_grad),
        temporaries=at_peak[TEMPORARIES],
        peak=peak,
        at_peak=at_peak,
        modules=by_module(allocations),
        **process,
        **{name: largest(allocations, name) for name in CATEGORIES if name != TEMPORARIES},
    )


def _optimizer_allocations(
    optimizer: Sequence[ParameterStep], run: FakeStep
) -> Iterator[Allocation]:
    """Its state, which was there before the step, and the temporaries of its step."""
    state = sum(sum(part.state) for part in optimizer)
    temporaries = max((part.temporaries for part in optimizer), default=0)
    yield Allocation(state, category="optimizer_state")
    yield Allocation(temporaries, run.step, run.step + 1)


def _size(asked: Request) -> str:
    if not isinstance(asked.batch, Mapping):
        return f"{asked.batch} x {asked.length}"
    tensors = ((name, x) for name, x in asked.batch.items() if isinstance(x, torch.Tensor))
    return ", ".join(f"{name} {' x '.join(map(str, x.shape))}" for name, x in tensors)


def _title(model: Any, asked: Request) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = [p for p in model.parameters() if p.is_floating_point()]  # not quantized codes
    count = sum(p.numel() for p in parameters)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    parts = [
        type(base).__name__,
        f"{count:,} parameters ({', '.join(dtypes)})",
        f"batch {_size(asked)}",
        asked.mode,
    ]
    if asked.trains:
        parts.append(f"optimizer {asked.optimizer}")
    parts += [name for name in ("checkpoint", "patched") if getattr(asked, name)]
    if asked.quantize:
        parts.append(asked.quantize)
    if asked.lora_rank:
        parts.append(f"LoRA of rank {asked.lora_rank}")
    if asked.world > 1:
        parts.append(f"per rank of {asked.world}, {asked.strategy}")
    return ", ".join(parts)
