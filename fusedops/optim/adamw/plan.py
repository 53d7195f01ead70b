"""Groups AdamW's parameters by the kernel or torch function that steps them, and runs a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from fusedops import notice
from fusedops.backends import uncompiled
from fusedops.extension import _C, UNCOMPILED
from fusedops.functional.adamw import FLOATS
from fusedops.optim.adamw.check import described
from fusedops.optim.adamw.offload import (
    Offloaded,
    capturing,
    home,
    hosted,
    offloads,
    refuse_capture,
)
from fusedops.optim.adamw.options import SINCE
from fusedops.optim.adamw.shard import (
    dtensor_class,
    is_dtensor,
    local,
    reduced,
    rows_of,
    sharded_dims,
)
from fusedops.optim.adamw.state import (
    STEP,
    Group,
    State,
    as_torchs,
    complete,
    empty_state,
    formatted,
    moments_dtype,
    rounding_of,
)
from fusedops.references.adamw import (
    OPTIONS,
    SQUARE_PARTS,
    STOCHASTIC,
    adamw_squares_reference,
)

AdamW = Any  # of optimizer.py, which imports this file


class StepPlan:
    """Parameters grouped for the kernels, for torch's step, and those without gradients yet.

    It does not reference its optimizer, so that the optimizer and its states are freed as soon as
    they are dropped.
    """

    def __init__(self, optimizer: AdamW) -> None:
        notice.give()
        _check_parameters(optimizer)
        if UNCOMPILED:
            _check_options(optimizer.param_groups)
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        self.asked = [_asked(group) for group in optimizer.param_groups]
        self.waiting: list[Tensor] = []  # without a gradient so far
        self.captured = False  # whether the last step is in a CUDA graph
        self.others: list[tuple[Group, list[Tensor]]] = []  # stepped by torch
        rows: dict[tuple, tuple[list, list, list]] = {}
        index = 0
        for number, group in enumerate(optimizer.param_groups):
            others: list[Tensor] = []
            for p in group["params"]:
                if p.grad is None and (p.is_meta or p not in optimizer.state):
                    self.waiting.append(p)
                elif covered(p, group):
                    params, states, kinds = rows.setdefault(_place(p, group), ([], [], []))
                    params.append(p)
                    states.append(_state(optimizer, p, group, index))
                    kinds += [number, rounding_of(p, group), index, *_rows(p, group)]
                else:
                    others.append(p)
                    as_torchs(optimizer.state.get(p), p)
                index += 1
            if others:
                self.others.append((group, others))
        self.kinds = [_kind(p) for _, ps in self.others for p in ps]
        self.buckets: list[tuple[Tensor, _C.AdamWBucket | Offloaded]] = [
            (lists[0][0], Offloaded(*lists) if place[0] else _C.AdamWBucket(*lists))
            for place, lists in rows.items()
        ]

    def holds(self, optimizer: AdamW) -> bool:
        """Whether a new plan would be the same."""
        groups = optimizer.param_groups
        return (
            len(groups) == len(self.groups)
            and all(
                _C.same_objects(group["params"], params) and _asked(group) == asked
                for group, params, asked in zip(groups, self.groups, self.asked, strict=True)
            )
            and not _C.any_gradient(self.waiting)
            and all(bucket.unchanged(optimizer.state) for _, bucket in self.buckets)
            and not any(covered(p, group) for group, ps in self.others for p in ps)
            and [_kind(p) for _, ps in self.others for p in ps] == self.kinds
        )

    def run(self, optimizer: AdamW, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Runs a step. grad_scale, found_inf: GradScaler's, float32 scalars."""
        _count_betas(optimizer)
        limit = optimizer.defaults["max_grad_norm"]
        squares = None if limit is None else self._squares()
        before = self.captured
        self.captured = any(capturing(first.device) for first, _ in self.buckets)
        for first, bucket in self.buckets:
            device = first.device
            options, lrs = _options(optimizer.param_groups, device)
            if before or self.captured:
                bucket.renew_table(capturing(device))
            bucket.step(
                options,
                lrs,
                optimizer.param_groups[0]["seed"],
                _on(squares, device),
                limit or 0.0,
                _on(grad_scale, device),
                _on(found_inf, device),
            )
        if self.others:
            self._run_others(optimizer, squares, limit, grad_scale, found_inf)

    def _squares(self) -> Tensor | None:
        """The gradients' squared norm in float64, over all devices and, if sharded, all ranks."""
        sums = [_squares_of(first, bucket) for first, bucket in self.buckets]
        sums += [
            reduced(p, adamw_squares_reference([local(p.grad)]))
            for _, ps in self.others
            for p in ps
            if p.grad is not None
        ]
        parts = [squares for squares in sums if squares is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return torch.stack([squares.to(parts[0].device) for squares in parts]).sum(0)

    def _run_others(self, optimizer: AdamW, squares, limit, grad_scale, found_inf) -> None:
        """torch's own step for parameters without a kernel."""
        if found_inf is not None and found_inf.item() != 0:
            return
        factor = 1.0 if grad_scale is None else 1 / float(grad_scale)
        if squares is not None:
            norm = float(squares.sum().sqrt()) * factor
            if not norm < torch.inf:
                return
            factor *= min(1.0, limit / (norm + 1e-6))
        for group, params in self.others:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            with_grad, grads, exp_avgs, exp_avg_sqs, maxima, steps = lists
            chosen = group | {"params": params, "fused": None}
            if any(local(p).is_neg() for p in params):
                chosen["foreach"] = False  # torch's foreach functions cannot write to these
            has_complex = optimizer._init_group(chosen, *lists)
            adam(
                with_grad,
                [_scaled(grad.resolve_conj(), factor) for grad in grads],
                exp_avgs,
                exp_avg_sqs,
                maxima,
                steps,
                has_complex=has_complex,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                decoupled_weight_decay=True,
                **{name: chosen[name] for name in _OF_TORCH},
            )


def _scaled(grad: Tensor, factor: float) -> Tensor:
    return grad if factor == 1 else grad * factor


def _check_parameters(optimizer: AdamW) -> None:
    """Raises RuntimeError for a parameter that no step can change, before any state is changed."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in enumerate(params):
        grad, exp_avg = p.grad, optimizer.state.get(p, {}).get("exp_avg")
        if grad is None:
            continue
        if p.is_floating_point() and grad.is_floating_point() and grad.dtype != p.dtype:
            raise RuntimeError(
                f"AdamW: step: the gradient of parameter {index} must be {described(p)} like the "
                f"parameter, got {described(grad)}; call zero_grad() after a change of dtype"
            )
        if p.is_meta and isinstance(exp_avg, Tensor) and not exp_avg.is_meta:
            raise RuntimeError(
                f"AdamW: step: parameter {index} must be on {exp_avg.device} like its state, got "
                f"{described(p)}; move the model back or make a new optimizer"
            )


def _check_options(groups: list[Group]) -> None:
    """Raises RuntimeError for an option that torch's step does not have."""
    for group in groups:
        for name, values in _OF_BOTH.items():
            if group[name] not in values:
                raise RuntimeError(f"AdamW: {name}={group[name]!r} cannot run: {uncompiled()}")


def _kind(p: Tensor) -> tuple:
    """What torch's step needs its state to match."""
    return p.dtype, p.device, None if p.grad is None else p.grad.dtype


def _state(optimizer: AdamW, p: Tensor, group: Group, index: int) -> dict:
    state, like = optimizer.state[p], home(p, group)
    if like is not p:
        refuse_capture(p.device)
    if not state:
        state.update(empty_state(like, group))
    elif not _fits(state, like, group):
        converted = formatted(state, like, group)
        state.clear()
        state.update(converted)
    complete(state, like, group)
    return state if like is p else hosted(state, p.device)


def _fits(state: State, like: Tensor, group: Group) -> bool:
    """False if torch's step created the state, or if it is on another device."""
    dtypes = {"exp_avg": moments_dtype(like, group), STEP: torch.float32}
    tensors = {name: state.get(name) for name in dtypes}
    return all(
        isinstance(t, Tensor) and t.dtype == dtypes[name] and t.device == like.device
        for name, t in tensors.items()
    )


def _rows(p: Tensor, group: Group) -> tuple[int, int]:
    """`rows_of`, or (0, 0) without scales and random numbers, where blocks do not matter."""
    plain = moments_dtype(p, group) == torch.float32 and rounding_of(p, group) != STOCHASTIC
    return (0, 0) if plain else rows_of(p)


def _place(p: Tensor, group: Group) -> tuple:
    """Parameters with the same key are stepped together.

    The key says whether states are offloaded, the device, and how a DTensor is sharded.
    """
    if not is_dtensor(p):
        return (offloads(p, group), p.device)
    whole = (placement.is_replicate() for placement in p.placements)
    return (offloads(p, group), p.device, p.device_mesh, *whole)


def _squares_of(first: Tensor, bucket: _C.AdamWBucket | Offloaded) -> Tensor | None:
    """A bucket's squares on all ranks. Ranks without gradients join the sum too."""
    squares = bucket.squares()
    if squares is None and sharded_dims(first):
        squares = torch.zeros(SQUARE_PARTS, dtype=torch.float64, device=first.device)
    return squares if squares is None else reduced(first, squares)


_OF_TORCH = (
    "amsgrad",
    "lr",
    "weight_decay",
    "eps",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
)
_OF_BOTH = {  # the options' values that torch's step has too
    "state_dtype": ("float32",),
    "stochastic_rounding": (None, False),
    "master_weights": (None,),
    "offload": (None,),
}
_CHOOSING = (
    "amsgrad",
    "differentiable",
    "state_dtype",
    "min_8bit_size",
    "stochastic_rounding",
    "master_weights",
    "offload",
)


def covered(p: Tensor, group: Group) -> bool:
    """Whether the kernels take this parameter and its gradient."""
    return (
        not UNCOMPILED
        and type(p) in (Tensor, torch.nn.Parameter, dtensor_class())
        and p.dtype in FLOATS
        and p.device.type in ("cpu", "cuda")
        and p.layout == torch.strided
        and not local(p).is_neg()
        and not group["differentiable"]
        and not any(isinstance(beta, Tensor) for beta in group["betas"])
        and (p.grad is None or _plain(p.grad, p))
    )


def _plain(grad: Tensor, p: Tensor) -> bool:
    if is_dtensor(p) and is_dtensor(grad):
        same_layout = (grad.placements, grad.device_mesh) == (p.placements, p.device_mesh)
        return same_layout and grad.dtype == p.dtype
    return (
        type(grad) in (Tensor, torch.nn.Parameter)
        and not is_dtensor(p)
        and grad.layout == torch.strided
        and grad.dtype == p.dtype
        and grad.device == p.device
    )


def _asked(group: Group) -> list:
    """The options that decide how a parameter is stepped."""
    return [group[name] for name in _CHOOSING]


REMEMBERED = 10  # times 1 / (1 - beta1) steps


def _count_betas(optimizer: AdamW) -> None:
    """Counts the steps of groups with 8-bit state since their betas changed, as schedules do.

    The bound on 8-bit first moments holds for constant betas.
    """
    before = optimizer.__dict__.setdefault("_betas", {})
    for number, group in enumerate(optimizer.param_groups):
        if group["state_dtype"] != "int8":
            continue
        betas = group["betas"]
        if before.get(number, betas) != betas:
            group[SINCE] = 0
        elif SINCE in group:
            group[SINCE] += 1
            if group[SINCE] * (1 - betas[0]) > REMEMBERED:
                del group[SINCE]
        before[number] = betas


def _options(groups: list[Group], device: torch.device) -> tuple[list[float], list[Tensor]]:
    """The numbers of all groups, and their learning rates if these are on the device."""
    options: list[float] = []
    lrs: list[Tensor] = []
    on_device = any(isinstance(g["lr"], Tensor) and g["lr"].device == device for g in groups)
    if on_device and device.type != "cpu":
        lrs = [torch.as_tensor(g["lr"], dtype=torch.float32, device=device) for g in groups]
    for group in groups:
        lr = 0.0 if lrs else float(group["lr"])
        beta1, beta2 = group["betas"]
        rest = (float(group[name]) for name in OPTIONS[3:-1])
        options += [lr, beta1, beta2, *rest, float(SINCE not in group)]
    return options, lrs


def _on(t: Tensor | None, device: torch.device) -> Tensor | None:
    return t if t is None else t.to(device)
