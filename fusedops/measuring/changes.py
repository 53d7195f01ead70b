"""Defines the changes to a training step that profile, sweep and tune try.

A `Change` has its code as a user writes it, how to apply it to a live step and undo it, and why it
cannot be made. `fusedops.profile` makes changes live, `fusedops.tune` runs their code, and
`fusedops.sweep` makes them on copies of a model.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from fusedops.allocator import keep_freed_memory
from fusedops.machine import usable_cpus
from fusedops.measuring.recompute import checkpointed
from fusedops.optim import AdamW, AdamW8bit
from fusedops.patching import patch, patched
from fusedops.patching.core.kinds import only
from fusedops.patching.quantize import quantized_layer, sites

__all__ = [
    "CHANGES",
    "REPLACEMENTS",
    "ROUNDING",
    "Change",
    "Groups",
    "Target",
    "fitting_threads",
    "frozen_linears",
    "with_settings",
]

ROUNDING = "results differ by rounding"
FORMAT = "nf4"  # of frozen weights
SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
ADAMW = f"""\
names = {", ".join(f'"{name}"' for name in ("params", *SETTINGS))}
groups = [{{name: group[name] for name in names}} for group in optimizer.param_groups]
state = optimizer.state_dict()
optimizer = CLASS(groups)
if state["state"]:
    optimizer.load_state_dict(state)
"""
FROZEN = f"""\
trained = [name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad]
fusedops.quantize(model, "{FORMAT}", skip=["lm_head", *filter(None, trained)])
"""
ONLY_LOSS = only("loss")

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """What is changed. blocks: the paths of the blocks whose activations are recomputed."""

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    blocks: Sequence[str] = ()

    @cached_property
    def quantized_linears(self) -> dict[str, nn.Module]:
        """Quantized layers by the paths of the frozen linears that they replace."""
        linears = frozen_linears(self.model) if self.model is not None else {}
        paths = {linear: path for path, linear in linears.items()}  # some have two
        layers = {
            linear: quantized_layer(path, linear, FORMAT, {}) for linear, path in paths.items()
        }
        return {path: layers[linear] for path, linear in linears.items()}


Live = Callable[[Target], AbstractContextManager[object]]


def _possible(target: Target) -> str:
    return ""


@dataclass(frozen=True)
class Change:
    """One change to a training step.

    results: how it changes the model's results; empty if not at all. code: lines in a function of
    `model` and `optimizer`; bf16's line stands around the forward. live: a context in which a live
    step is changed; None where only new code does it. why_not: why it cannot be made on a target;
    empty if it can. same_memory: torch's tensors stay the same. undone: nothing of it is left.
    make: applies it to a model.
    """

    name: str
    results: str = ""
    code: str = ""
    live: Live | None = None
    why_not: Callable[[Target], str] = _possible
    same_memory: bool = False
    undone: bool = True
    make: Callable[[nn.Module], object] | None = None


def fitting_threads() -> int:
    """As many threads as the process has CPUs."""
    return max(1, int(usable_cpus()))


def with_settings(groups: Groups) -> Groups:
    """An AdamW's groups, with the settings that another AdamW takes over."""
    names = ("params", *SETTINGS)
    return [{name: group[name] for name in names if name in group} for group in groups]


# What may replace torch.optim.AdamW, made from its parameter groups.
REPLACEMENTS: Mapping[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "adamw8bit": lambda groups: AdamW8bit(with_settings(groups)),
    "fused_adamw": lambda groups: AdamW(with_settings(groups)),
}


def _no_model(target: Target) -> str:
    return "no model was given" if target.model is None else ""


def _not_adamw(target: Target) -> str:
    kind = type(target.optimizer)
    if kind is torch.optim.AdamW:
        return ""
    return f"the optimizer is {kind.__module__}.{kind.__name__}, not torch.optim.AdamW"


def _no_frozen_linears(target: Target) -> str:
    if target.model is None:
        return _no_model(target)
    return (
        "" if frozen_linears(target.model) else "quantize would replace none of the frozen linears"
    )


def _no_compiler(target: Target) -> str:
    return "" if importlib.util.find_spec("torch._inductor") else "torch has no compiler here"


def frozen_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Frozen linears that `fusedops.quantize` would quantize: no embedding, no head."""
    linears = {path: linear for path, linear, reason in sites(model, ("lm_head",)) if not reason}
    return {path: linear for path, linear in linears.items() if not linear.weight.requires_grad}


@contextmanager
def _patched(target: Target, kinds: Mapping[str, bool] | None = None) -> Iterator[None]:
    assert target.model is not None
    with ExitStack() as undo:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # patch warns where it finds nothing
            undo.enter_context(patched(target.model, **(kinds or {})))
        yield


@contextmanager
def _stepped_by(name: str, target: Target) -> Iterator[None]:
    """The user's optimizer object steps like another optimizer with the same settings."""
    optimizer = target.optimizer
    assert optimizer is not None
    other = REPLACEMENTS[name](optimizer.param_groups)
    optimizer.step = other.step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.step  # the class's method again


def _bf16(target: Target) -> torch.autocast:
    parameters = target.model.parameters() if target.model is not None else ()
    device = next((p.device.type for p in parameters), "cpu")
    return torch.autocast(device, torch.bfloat16)


@contextmanager
def _threads(target: Target) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(fitting_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _kept_freed_memory(target: Target) -> Iterator[None]:
    keep_freed_memory()
    try:
        yield
    finally:
        keep_freed_memory(False)


@contextmanager
def _checkpointed(target: Target) -> Iterator[None]:
    assert target.model is not None
    with checkpointed(target.model, target.blocks):
        yield


@contextmanager
def _quantized(target: Target) -> Iterator[None]:
    assert target.model is not None
    model, layers = target.model, target.quantized_linears
    linears = {path: model.get_submodule(path) for path in layers}
    try:
        for path, layer in layers.items():
            model.set_submodule(path, layer)
        yield
    finally:
        for path, linear in linears.items():
            model.set_submodule(path, linear)


# In the order in which code makes them.
CHANGES: dict[str, Change] = {
    change.name: change
    for change in (
        Change(
            "threads",
            "sums are split differently",
            f"torch.set_num_threads({fitting_threads()})\n",
            _threads,
            same_memory=True,
        ),
        Change(
            "quantize_lora",
            "frozen weights are rounded to 4 bits",
            FROZEN,
            _quantized,
            _no_frozen_linears,
        ),
        Change("patch", ROUNDING, "fusedops.patch(model)\n", _patched, _no_model, make=patch),
        Change(
            "loss",
            ROUNDING,
            f"fusedops.patch(model, {', '.join(f'{name}=False' for name in ONLY_LOSS)})\n",
            partial(_patched, kinds=ONLY_LOSS),
            _no_model,
        ),
        Change(
            "checkpoint",
            "",
            "model.gradient_checkpointing_enable()\n",
            _checkpointed,
            _no_model,
        ),
        Change(
            "compile",
            ROUNDING,
            "model.compile()\n",
            None,
            _no_compiler,
            make=lambda model: model.compile(),
        ),
        Change(
            "adamw8bit",
            "moments are rounded to 8 bits",
            ADAMW.replace("CLASS", "fusedops.optim.AdamW8bit"),
            partial(_stepped_by, "adamw8bit"),
            _not_adamw,
        ),
        Change(
            "fused_adamw",
            ROUNDING,
            ADAMW.replace("CLASS", "fusedops.optim.AdamW"),
            partial(_stepped_by, "fused_adamw"),
            _not_adamw,
        ),
        Change(
            "bf16",
            "matmuls run in bfloat16",
            'with torch.autocast("cpu", torch.bfloat16):\n',
            _bf16,
        ),
        # The C library's earlier setting cannot be read, so it is not restored unless asked for.
        Change(
            "keep_freed_memory",
            "",
            "fusedops.keep_freed_memory()\n",
            _kept_freed_memory,
            same_memory=True,
            undone=False,
        ),
    )
}
