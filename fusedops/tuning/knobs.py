"""The knobs of `fusedops.tune`: changes to a step, such as patching, bfloat16 or compiling."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusedops.machine import usable_cpus
from fusedops.patching.quantize import sites
from fusedops.tuning.setting import Setting

__all__ = ["KNOBS", "Knob", "Subject"]

FROZEN = 0.5  # share of the parameters' bytes from which frozen weights are worth quantizing
SLOW_INPUT = 0.05  # share of the step that make_batch must take for workers to be tried


@dataclass(frozen=True)
class Subject:
    """What is tuned. input_share: of the baseline's step that make_batch takes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    input_share: float = 0.0
    limited: bool = False  # there is a limit of memory


@dataclass(frozen=True)
class Knob:
    """One change of a setting. results: how it changes the model's results; empty if not at all.

    without: why it cannot be turned here; empty if it can. least: the ratio that it must exceed.
    """

    name: str
    results: str
    turn: Callable[[Setting], Setting]
    without: Callable[[Subject, Setting], str] = lambda subject, setting: ""
    least: float = 1.0


def _not_adamw(subject: Subject, setting: Setting) -> str:
    cls = type(subject.optimizer)
    if cls is not torch.optim.AdamW:
        return f"the optimizer is {cls.__module__}.{cls.__name__}, not torch.optim.AdamW"
    return ""


def _slow_bfloat16(subject: Subject, setting: Setting) -> str:
    if setting.patch or torch.backends.cpu.get_cpu_capability() == "AVX512":
        return ""
    return "torch has no kernel for bfloat16 products on this CPU; a patched model has fusedops'"


def _no_checkpointing(subject: Subject, setting: Setting) -> str:
    model: Any = subject.model
    if not getattr(model, "supports_gradient_checkpointing", False):
        return "the model has no gradient_checkpointing_enable()"
    return "" if subject.limited else "it saves memory and takes time, and no limit was given"


def _no_parts(subject: Subject, setting: Setting) -> str:
    fits = setting.batch % (2 * setting.micro_batches) == 0
    return (
        "" if fits else f"{setting.batch} samples have no {2 * setting.micro_batches} equal parts"
    )


def _cpus() -> int:
    return max(1, int(usable_cpus()))


def _no_threads(subject: Subject, setting: Setting) -> str:
    there, used = _cpus(), setting.threads or torch.get_num_threads()
    return "" if used != there else f"torch uses as many threads as there are CPUs: {there}"


def _no_compiler(subject: Subject, setting: Setting) -> str:
    return "" if importlib.util.find_spec("torch._inductor") else "torch has no compiler here"


def _nothing_frozen(subject: Subject, setting: Setting) -> str:
    linears = {module for _, module, why in sites(subject.model, ("lm_head",)) if not why}
    frozen = sum(m.weight.nbytes for m in linears if not m.weight.requires_grad)
    whole = sum(p.nbytes for p in subject.model.parameters())
    return "" if frozen >= FROZEN * whole else "less than half of the parameters is frozen linears"


def _fast_input(subject: Subject, setting: Setting) -> str:
    if subject.input_share >= SLOW_INPUT:
        return ""
    return f"make_batch takes {subject.input_share:.1%} of the step"


WORTH = 1.02  # a change that alters results by more than rounding must gain 2 %
ROUNDING = "results differ by rounding"
KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("patch", ROUNDING, lambda s: replace(s, patch=True)),
        Knob(
            "fused_adamw",
            ROUNDING,
            lambda s: replace(s, optimizer="fusedops.optim.AdamW"),
            _not_adamw,
        ),
        Knob(
            "adamw8bit",
            "moments are rounded to 8 bits",
            lambda s: replace(s, optimizer="fusedops.optim.AdamW8bit"),
            _not_adamw,
            WORTH,
        ),
        Knob(
            "bf16",
            "matmuls run in bfloat16",
            lambda s: replace(s, bf16=True),
            _slow_bfloat16,
            WORTH,
        ),
        Knob("checkpoint", "", lambda s: replace(s, checkpoint=True), _no_checkpointing),
        Knob(
            "micro_batch",
            "gradients of parts are averaged: the same if parts have as many labels",
            lambda s: replace(s, micro_batches=2 * s.micro_batches),
            _no_parts,
        ),
        Knob(
            "workers",
            "",
            lambda s: replace(s, workers=1),
            _fast_input,
        ),
        Knob(
            "threads",
            "sums are split differently",
            lambda s: replace(s, threads=_cpus()),
            _no_threads,
        ),
        Knob("compile", ROUNDING, lambda s: replace(s, compile=True), _no_compiler),
        Knob(
            "quantize_lora",
            "frozen weights are rounded to 4 bits",
            lambda s: replace(s, quantize="nf4"),
            _nothing_frozen,
            WORTH,
        ),
    )
}
