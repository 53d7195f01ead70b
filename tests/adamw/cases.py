"""Shared helpers for AdamW tests: steps on every backend, and accuracy checks."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from contract.fuzzing import Rounded, judge
from torch import Tensor

import fusedops
from fusedops.references.adamw import (
    KINDS,
    NEAREST,
    REMAINDER,
    adamw_step_reference,
    decoded,
    encoded,
    max_ratio,
    with_remainder,
)
from fusedops.testing import device_of, poisoned, yardstick

MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
OPTIONS = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "maximize": 0.0,
    "amsgrad": 0.0,
    "bounded": 1.0,
}


@dataclass
class Step:
    """Arguments of `adamw_step` for several tensors of one kind."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    remainders: list[Tensor] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    options: list[float] = field(default_factory=list)
    lrs: list[Tensor] = field(default_factory=list)
    seed: int = 7
    more: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> "Step":
        def same(value):
            return [_copied(t) if isinstance(t, Tensor) else t for t in value]

        lists = {k: same(v) for k, v in vars(self).items() if isinstance(v, list)}
        return replace(self, **lists)

    def run(self, backend: str) -> "Step":
        """Runs a copy of a step on a backend."""
        done = self.copy()
        with fusedops.backend(backend), poisoned():
            torch.ops.fusedops.adamw_step(*done.arguments(), **self.more)
        return done

    def arguments(self) -> list:
        return [v for k, v in vars(self).items() if k != "more"]


def _copied(t: Tensor) -> Tensor:
    """Returns a copy with equal strides and equal bytes between the elements."""
    size = t.untyped_storage().nbytes() // t.itemsize
    return (
        t.as_strided((size,), (1,), 0).clone().as_strided(t.shape, t.stride(), t.storage_offset())
    )


def step_of(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    moments: str = "float32",
    rounding: int = NEAREST,
    taken: int = 3,
    layout=lambda t: t,
    by_rows: bool = False,
    backend: str = "cpu",
    **options: float,
) -> Step:
    """Returns a step in the middle of a training, with random states."""
    torch.manual_seed(len(shapes))
    step = Step([], [], [], [], [], options=[*(OPTIONS | options).values()])
    for index, shape in enumerate(shapes):
        row = math.prod(shape[1:]) if by_rows and len(shape) > 1 else 0
        p, g = torch.randn(shape), torch.randn(shape)
        m, v = torch.randn(shape) * 0.1, torch.rand(shape) * 0.1 + 1e-6
        if options.get("amsgrad"):
            step.max_exp_avg_sqs.append(layout(v * (0.5 + torch.rand(shape))))
        if moments == "int8":
            betas = (OPTIONS | options)["beta1"], (OPTIONS | options)["beta2"]
            largest = 0.8 * max_ratio(*betas, max(taken, 1)) * v.sqrt()
            m, v, *scales = encoded(m.clamp(-largest, largest), v, row=row)
            step.scales += scales
        else:
            m, v = layout(m.to(MOMENTS[moments])), layout(v.to(MOMENTS[moments]))
        step.params.append(layout(p.to(dtype)))
        step.grads.append(layout(g.to(dtype)))
        step.exp_avgs.append(m)
        step.exp_avg_sqs.append(v)
        step.steps.append(torch.tensor(float(taken)))
        if rounding == REMAINDER:
            step.remainders.append(layout(torch.randint(-(2**15), 2**15, shape).short()))
        step.kinds += [0, rounding, index, row, 10 * index]
    return _placed(step, backend)


def _placed(step: Step, backend: str) -> Step:
    device = device_of(backend)
    lists = {
        k: [t.to(device) if isinstance(t, Tensor) else t for t in v]
        for k, v in vars(step).items()
        if isinstance(v, list)
    }
    return replace(step, **lists)


def widened(step: Step, dtype: torch.dtype) -> Step:
    """Returns the same step in `dtype`, with codes decoded and nothing rounded."""
    wide = step.copy()
    scales, remainders = iter(wide.scales), iter(wide.remainders)
    for i, p in enumerate(wide.params):
        if wide.kinds[KINDS * i + 1] == REMAINDER:
            wide.params[i] = with_remainder(p, next(remainders))
        wide.kinds[KINDS * i + 1] = NEAREST
        if wide.exp_avgs[i].dtype == torch.int8:
            pair = (next(scales).to(dtype) for _ in range(2))
            codes = wide.exp_avgs[i], wide.exp_avg_sqs[i], *pair
            row = wide.kinds[KINDS * i + 3]
            wide.exp_avgs[i], wide.exp_avg_sqs[i] = decoded(*codes, row)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    lists = {name: [t.to(dtype) for t in getattr(wide, name)] for name in names}
    return replace(wide, **lists, scales=[], remainders=[])


def check(step: Step, backend: str, redrawn: int = 0) -> Step:
    """Asserts that a backend's step is as accurate as eager float32, and returns it.

    What is stored in fewer bits must be what the reference makes of a result that passes: of the
    kernel's own, which nobody sees, it is the nearest or the one that the random bits choose, so at
    most one step of the format away, and seldom that. redrawn: how many evaluations with roundings
    drawn anew are to say what eager's error may be, as `fuzzing.judge` does.
    """
    taken = step.run(backend)
    eager, exact = widened(step, torch.float32), widened(step, torch.float64)
    adamw_step_reference(*eager.arguments(), **step.more)
    adamw_step_reference(*exact.arguments(), **step.more)
    others = [_redrawn(step, seed) for seed in range(redrawn)]
    kept = step.copy()
    adamw_step_reference(*kept.arguments(), **step.more)
    for ours, theirs in zip(taken.steps, kept.steps, strict=True):
        assert torch.equal(ours, theirs)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        lists = [getattr(s, name) for s in (taken, kept, eager, exact, *others)]
        triples = []
        for ours, theirs, *wide in zip(*lists, strict=True):
            if ours.dtype == torch.float32:
                triples.append((ours, *wide))
            else:
                _check_stored(name, ours, theirs)
        _check_computed(name, triples)
    torch.testing.assert_close(taken.scales, kept.scales, rtol=1e-5, atol=0)
    masters = [
        (with_remainder(p, rest), *wide)
        for p, rest, *wide in zip(
            taken.params,
            taken.remainders,
            *(s.params for s in (eager, exact, *others)),
            strict=False,
        )
    ]
    _check_computed("masters", masters)
    return taken


def _check_computed(name: str, triples: list[tuple[Tensor, ...]]) -> None:
    """Applies the yardstick to each large tensor, and to all small tensors together."""
    long = [triple for triple in triples if triple[0].numel() > 64]
    short = [tuple(t.flatten() for t in triple) for triple in triples if triple[0].numel() <= 64]
    if short:
        long.append(tuple(torch.cat(column) for column in zip(*short, strict=True)))
    for ours, eager, exact, *others in long:
        if others:
            complaint = judge(ours, eager, exact, partial(iter, others))
        else:
            complaint = yardstick(ours, eager, exact)
        assert complaint is None, f"{name} {tuple(ours.shape)}: {complaint}"


def _redrawn(step: Step, seed: int) -> Step:
    """Returns the step in float64, with float32's rounding errors drawn at random."""
    wide = widened(step, torch.float64)
    with Rounded(torch.float32, seed):
        adamw_step_reference(*wide.arguments(), **step.more)
    return wide


def _check_stored(name: str, ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if not ours.numel():
        return
    if ours.is_floating_point():
        apart = (ours.float() - theirs.float()).abs()
        cancelled = apart <= 4 * torch.finfo(torch.float32).eps * theirs.float().abs().max()
        steps = (_ordered(ours) - _ordered(theirs)).masked_fill(cancelled, 0)
    else:
        steps = ours.int() - theirs.int()
    steps = steps.abs()
    assert steps.max() <= 1, f"{name}: {int(steps.max())} steps away"
    seldom = max(2, 0.03 * steps.numel())
    assert steps.count_nonzero() <= seldom, f"{name}: {int(steps.count_nonzero())} differ"


def _ordered(t: Tensor) -> Tensor:
    """Maps a 16-bit float to an int with the same order."""
    bits = t.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
