"""Changes that `Profile.measure` can try on a live step and undo."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from fusedops.allocator import keep_freed_memory
from fusedops.machine import usable_cpus
from fusedops.patching import patched
from fusedops.profiling.advice.patches import ONLY_LOSS
from fusedops.profiling.collect.everything import Subject
from fusedops.profiling.collect.optimizers import OTHERS

__all__ = ["KNOBS", "SAFE", "SAME_MEMORY", "available"]


@contextmanager
def _patch(subject: Subject) -> Iterator[None]:
    assert subject.model is not None
    with ExitStack() as kept:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # patch warns where it finds nothing
            kept.enter_context(patched(subject.model))
        yield


@contextmanager
def _loss(subject: Subject) -> Iterator[None]:
    assert subject.model is not None
    with ExitStack() as kept:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept.enter_context(patched(subject.model, **ONLY_LOSS))
        yield


@contextmanager
def _stepped_by(name: str, subject: Subject) -> Iterator[None]:
    """The user's optimizer object steps like another optimizer with the same settings."""
    optimizer = subject.optimizer
    assert optimizer is not None
    other = OTHERS[name](optimizer.param_groups)
    optimizer.step = other.step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.step  # the class's method again


@contextmanager
def _bf16(subject: Subject) -> Iterator[None]:
    parameters = subject.model.parameters() if subject.model is not None else ()
    device = next((p.device.type for p in parameters), "cpu")
    with torch.autocast(device, torch.bfloat16):
        yield


@contextmanager
def _threads(subject: Subject) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(usable_cpus())))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _freed_memory(subject: Subject) -> Iterator[None]:
    keep_freed_memory()
    try:
        yield
    finally:
        keep_freed_memory(False)


KNOBS: dict[str, Callable] = {
    "patch": _patch,
    "loss": _loss,
    "adamw8bit": partial(_stepped_by, "adamw8bit"),
    "fused_adamw": partial(_stepped_by, "fused_adamw"),
    "bf16": _bf16,
    "threads": _threads,
    "keep_freed_memory": _freed_memory,
}
# The C library's setting that was there before cannot be read, so it is not put back by itself.
SAFE = ("patch", "loss", "adamw8bit", "fused_adamw", "bf16", "threads")
SAME_MEMORY = ("threads", "keep_freed_memory")  # torch's tensors are the same with them


def available(name: str, subject: Subject) -> str:
    """Why a change cannot be tried on this step; empty if it can."""
    if name in ("patch", "loss") and subject.model is None:
        return "no model was given"
    if name in OTHERS:
        if type(subject.optimizer) is not torch.optim.AdamW:
            return "the optimizer is not torch.optim.AdamW"
        if "step" in vars(subject.optimizer):  # a scheduler has wrapped it
            return "the optimizer's step was replaced, for example by a scheduler"
    return ""
