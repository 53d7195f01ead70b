"""`AdamWBucket` in plain Python: parameters with AdamW states; in C++, csrc/python/adamw.cpp."""

from typing import Any

import torch
from torch import Tensor

from fusedops import notice
from fusedops.uncompiled.adamw import AMSGRAD, KINDS, OPTIONS
from fusedops.uncompiled.library import export

STATES = (
    "step",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "remainder",
)


def local(t: Any) -> Tensor:
    """A DTensor's part on this rank; any other tensor itself."""
    return t if type(t) is Tensor else getattr(t, "_local_tensor", t)


@export
class AdamWBucket:
    """One device's parameters with their states, as adamw_step takes them.

    params: plain tensors, or DTensors, whose local tensors are used. states: one dict per
    parameter.
    """

    def __init__(self, params: list[Tensor], states: list[dict], kinds: list[int]) -> None:
        notice.give()
        self.params, self.states = list(params), list(states)
        self.kinds = [kinds[at : at + KINDS] for at in range(0, KINDS * len(params), KINDS)]
        self.known = [
            {name: state[name] for name in STATES if isinstance(state.get(name), Tensor)}
            for state in states
        ]
        self.tensors = [{name: local(t) for name, t in known.items()} for known in self.known]
        self.options = [(p.dtype, p.device) for p in params]

    def unchanged(self, state: dict) -> bool:
        """Whether state and parameters are as they were, and adamw_step takes each gradient."""
        held = zip(self.params, self.states, self.known, self.options, strict=True)
        return all(
            state.get(p) is of_p
            and (p.dtype, p.device) == options
            and all(of_p.get(name) is t for name, t in known.items())
            and _takes(p)
            for p, of_p, known, options in held
        )

    def squares(self) -> Tensor | None:
        """The sum of the gradients' squares, float64; None if there are no gradients."""
        grads = [local(p.grad) for p in self.params if p.grad is not None]
        return torch.ops.fusedops.adamw_squares(grads) if grads else None

    def step(
        self,
        options: list[float],
        lrs: list[Tensor],
        seed: int,
        squares: Tensor | None,
        max_grad_norm: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Steps the parameters that have gradients."""
        live = [i for i, p in enumerate(self.params) if p.grad is not None]
        if not live:
            return

        def of(name: str) -> list[Tensor]:
            return [self.tensors[i][name] for i in live if name in self.tensors[i]]

        amsgrad = [i for i in live if options[self.kinds[i][0] * OPTIONS + AMSGRAD]]
        scaled = [i for i in live if "exp_avg_scale" in self.tensors[i]]
        scales = [
            self.tensors[i][name] for i in scaled for name in ("exp_avg_scale", "exp_avg_sq_scale")
        ]
        params = [self.params[i] for i in live]
        torch.ops.fusedops.adamw_step(
            [local(p).detach() for p in params],
            [local(p.grad) for p in params],
            of("exp_avg"),
            of("exp_avg_sq"),
            of("step"),
            [self.tensors[i]["max_exp_avg_sq"] for i in amsgrad],
            scales,
            of("remainder"),
            [number for i in live for number in self.kinds[i]],
            options,
            lrs,
            seed,
            squares,
            max_grad_norm,
            grad_scale,
            found_inf,
        )

    def renew_table(self, captured: bool) -> None:
        """Kernels keep a table on the device; the references need none."""


def _takes(p: Tensor) -> bool:
    """Whether a gradient is missing, or matches its parameter."""
    if p.grad is None:
        return True
    grad, of = local(p.grad), local(p)
    same_kind = (grad.layout, grad.dtype, grad.device) == (torch.strided, of.dtype, of.device)
    plain = type(grad) in (Tensor, torch.nn.Parameter)
    return same_kind and plain and _cut_alike(p.grad, p)


def _cut_alike(grad: Any, p: Any) -> bool:
    """Whether a gradient is sharded like its parameter."""
    of_grad, of_p = getattr(grad, "_spec", None), getattr(p, "_spec", None)
    if of_grad is of_p or of_grad is None:
        return True
    return of_p is not None and grad.placements == p.placements


@export
def same_objects(a: list, b: list) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


@export
def any_gradient(params: list[Tensor]) -> bool:
    return any(p.grad is not None for p in params)
