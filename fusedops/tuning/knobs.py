"""The knobs of `fusedops.tune`: which changes it tries, how they alter a setting, and when."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fusedops.measuring.changes import (
    CHANGES,
    REPLACEMENTS,
    Change,
    Target,
    fitting_threads,
    frozen_linears,
)
from fusedops.profiling.collect.ceilings import ceilings
from fusedops.tuning.setting import Setting

__all__ = ["KNOBS", "SMALLER", "Knob", "TunedStep"]

FROZEN = 0.5  # share of the parameters' bytes from which frozen weights are worth quantizing
SLOW_INPUT = 0.05  # share of the step that make_batch must take for workers to be tried
WORTH = 1.02  # a change that alters results by more than rounding must gain 2 %


@dataclass(frozen=True)
class TunedStep:
    """What is tuned. input_share, optimizer_share: parts of the baseline's step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    input_share: float = 0.0
    optimizer_share: float = 0.0
    limited: bool = False  # there is a limit of memory


Why = Callable[[TunedStep, Setting], str]
Gain = Callable[[TunedStep], float]


@dataclass(frozen=True)
class Knob:
    """A change of a setting. useless: why it is not worth a trial here; empty if it is.

    least: the ratio that it must exceed. gain: the share of the step that it may save, roughly; it
    only orders the trials.
    """

    change: Change
    turn: Callable[[Setting], Setting]
    useless: Why = lambda subject, setting: ""
    least: float = 1.0
    gain: Gain = lambda subject: 0.02

    def without(self, subject: TunedStep, setting: Setting) -> str:
        """Why it is not tried; empty if it is."""
        target = Target(subject.model, subject.optimizer)
        return self.useless(subject, setting) or self.change.why_not(target)


def _slow_bfloat16(subject: TunedStep, setting: Setting) -> str:
    if "patch" in setting.changes or torch.backends.cpu.get_cpu_capability() == "AVX512":
        return ""
    return "torch has no kernel for bfloat16 products on this CPU; a patched model has fusedops'"


def _no_checkpointing(subject: TunedStep, setting: Setting) -> str:
    model: Any = subject.model
    if not getattr(model, "supports_gradient_checkpointing", False):
        return "the model has no gradient_checkpointing_enable()"
    return "" if subject.limited else "it saves memory and takes time, and no limit was given"


def _no_parts(subject: TunedStep, setting: Setting) -> str:
    fits = setting.batch % (2 * setting.micro_batches) == 0
    return (
        "" if fits else f"{setting.batch} samples have no {2 * setting.micro_batches} equal parts"
    )


def _no_threads(subject: TunedStep, setting: Setting) -> str:
    fitting = fitting_threads()
    same = f"torch uses as many threads as there are CPUs: {fitting}"
    return same if torch.get_num_threads() == fitting else ""


def _little_frozen(subject: TunedStep, setting: Setting) -> str:
    linears = set(frozen_linears(subject.model).values())
    frozen = sum(linear.weight.nbytes for linear in linears)
    whole = sum(p.nbytes for p in subject.model.parameters())
    return "" if frozen >= FROZEN * whole else "less than half of the parameters is frozen linears"


def _fast_input(subject: TunedStep, setting: Setting) -> str:
    if subject.input_share >= SLOW_INPUT:
        return ""
    return f"make_batch takes {subject.input_share:.1%} of the step"


def _added(name: str, setting: Setting) -> Setting:
    """The setting with one more change; one optimizer replaces another."""
    replaced = REPLACEMENTS if name in REPLACEMENTS else ()
    others = (change for change in setting.changes if change not in replaced)
    return replace(setting, changes=(*others, name))


def _adds(name: str, **rules: Any) -> Knob:
    return Knob(CHANGES[name], partial(_added, name), **rules)


def _bfloat16_gain(subject: TunedStep) -> float:
    peaks = ceilings(("float32", "bfloat16")).flops
    return 0.5 * max(0.0, 1 - peaks["float32"] / peaks["bfloat16"])


KNOBS: dict[str, Knob] = {
    knob.change.name: knob
    for knob in (
        _adds("patch", gain=lambda subject: 0.1),
        _adds("fused_adamw", gain=lambda subject: 0.6 * subject.optimizer_share),
        _adds("adamw8bit", least=WORTH, gain=lambda subject: 0.5 * subject.optimizer_share),
        _adds("bf16", useless=_slow_bfloat16, least=WORTH, gain=_bfloat16_gain),
        _adds("checkpoint", useless=_no_checkpointing),
        Knob(
            Change(
                "micro_batch",
                "gradients of parts are averaged: the same if parts have as many labels",
            ),
            lambda s: replace(s, micro_batches=2 * s.micro_batches),
            _no_parts,
        ),
        Knob(
            Change("workers"),
            lambda s: replace(s, workers=1),
            _fast_input,
            gain=lambda subject: subject.input_share,
        ),
        _adds("threads", useless=_no_threads, gain=lambda subject: 0.3),
        _adds("compile"),
        _adds("quantize_lora", useless=_little_frozen, least=WORTH),
    )
}

SMALLER = Knob(
    Change("batch", "an optimizer step sees fewer samples"),
    lambda setting: replace(setting, batch=setting.batch // 2, micro_batches=1),
)
