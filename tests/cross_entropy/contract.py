"""The calls of cross_entropy, linear_cross_entropy and linear_log_probs for tests/contract."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from contract.family import BF16, F32, Call, Family
from torch import Tensor

from cross_entropy.cases import OPTIONS, class_weight, head, logits, targets
from cross_entropy.errors import ERRORS
from fusedops.functional import cross_entropy, linear_cross_entropy, linear_log_probs
from fusedops.references.cross_entropy import (
    cross_entropy_reference,
    linear_cross_entropy_reference,
    linear_log_probs_reference,
)
from fusedops.testing import placed

LOG_PROBS = {
    "plain": {},
    "entropy": {"return_entropy": True},
    "all": {"return_entropy": True, "softcap": 5.0, "scale": 0.4, "temperature": 0.8},
}


def drawn(batch: tuple[int, ...], tiny: bool) -> tuple:
    rows, classes = *batch, 5 if tiny else 9
    return logits(rows, classes), targets(rows, classes), class_weight(classes)


def drawn_of_linear(batch: tuple[int, ...], tiny: bool) -> tuple:
    rows, features, classes = *batch, 3 if tiny else 5, 5 if tiny else 9
    x, w, b = head(rows, features, classes)
    return x, w, targets(rows, classes), b, class_weight(classes)


def call(options: str) -> Call:
    both = cross_entropy, cross_entropy_reference
    return Call("cross_entropy", *both, drawn, OPTIONS[options], still=(2,))


def as_tuple(result: Any) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def in_other_orders(run: Callable) -> tuple[Callable, ...]:
    """`run` with rows and features in eight other orders: eager rounds its sums otherwise."""

    def ordered(seed: int) -> Callable:
        def called(x: Tensor, w: Tensor, target: Tensor, *args: Any, **options: Any) -> Any:
            draw = torch.Generator().manual_seed(seed)
            orders = (torch.randperm(n, generator=draw, device="cpu") for n in x.shape)
            rows, features = (order.to(x.device) for order in orders)
            result = run(x[rows][:, features], w[:, features], target[rows], *args, **options)
            back = rows.argsort()
            in_order = (t[back] if t.dim() else t for t in as_tuple(result))
            return tuple(in_order) if isinstance(result, tuple) else next(in_order)

        return called

    return tuple(map(ordered, range(8)))


def linear_call(options: str) -> Call:
    both = linear_cross_entropy, linear_cross_entropy_reference
    arguments = {"names": ("linear_bias", "weight"), "still": (4,)}
    arguments["draws"] = partial(in_other_orders, linear_cross_entropy_reference)
    arguments["kept"] = (
        (0, 1) if "none" in options else ()
    )  # a mean's gradients are made in the forward
    return Call("linear_cross_entropy", *both, drawn_of_linear, OPTIONS[options], **arguments)


def drawn_of_log_probs(batch: tuple[int, ...], tiny: bool) -> tuple:
    return drawn_of_linear(batch, tiny)[:4]


def log_probs_reference(*args: Any, **options: Any) -> Any:
    log_probs, entropy, _ = linear_log_probs_reference(*args, **options)
    return log_probs if entropy is None else (log_probs, entropy)


def log_probs_call(options: str) -> Call:
    both = linear_log_probs, log_probs_reference
    arguments = {"names": ("linear_bias",), "kept": (0, 1)}
    arguments["draws"] = partial(in_other_orders, log_probs_reference)
    return Call("linear_log_probs", *both, drawn_of_log_probs, LOG_PROBS[options], **arguments)


def another_ignored(call: Call) -> Call:
    def drawn(*options: Any) -> tuple:
        tensors = call.draw(*options)
        return tuple(t.where(t != -100, 3) if t.dtype == torch.int64 else t for t in tensors)

    return replace(call, draw=drawn, options=call.options | {"ignore_index": 3})


def without_weight(options: str) -> Call:
    return replace(call(options), draw=lambda *arguments: drawn(*arguments)[:2], still=())


def without_more(options: str) -> Call:
    linear = linear_call(options)
    return replace(
        linear, draw=lambda *arguments: drawn_of_linear(*arguments)[:3], names=(), still=()
    )


def kernels(
    reduction: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, tuple]]:
    tensors = logits(6, 9, dtype), targets(6, 9), class_weight(9)
    z, target, weight = placed(tensors, device)
    x, w, b = placed(head(6, 5, 9, dtype), device)
    options = -100, reduction, [0.1, 0.2, 0.5, 3.0]
    for in_forward in (False, True):
        yield "cross_entropy_forward", (z, target, weight, *options, dtype, in_forward)
    result = torch.ops.fusedops.cross_entropy_forward(z, target, weight, *options, dtype, False)
    loss, lse, total, _ = result
    yield "cross_entropy_backward", (loss, z, target, weight, lse, total, *options)
    for mask in ([True, True, True], [True, False, False], [False, False, True]):
        if reduction:
            args = x, w, target, b, weight, *options, dtype, mask
            yield "linear_cross_entropy_forward", args
        args = loss, x, w, target, b, weight, lse, total, *options, mask
        yield "linear_cross_entropy_backward", args


def log_probs_kernels(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, tuple]]:
    x, w, b = placed(head(6, 5, 9, dtype), device)
    target, options = targets(6, 9).to(device), (-100, [0.5, 3.0])
    for optional in ([True, True], [False, True], [False, False]):
        args = x, w, target, b, *options, dtype, optional
        yield "linear_log_probs_forward", args
    log_probs, entropy, _, *sums = torch.ops.fusedops.linear_log_probs_forward(
        x, w, target, b, *options, dtype, [True, True]
    )
    for grads in ((log_probs, entropy), (log_probs, None), (None, entropy)):
        for mask in ([True, True, True], [True, False, False], [False, False, True]):
            args = *grads, x, w, target, b, *sums, *options, mask
            yield "linear_log_probs_backward", args


def with_rows(call: Call, rows: int = 40) -> Call:
    return replace(call, draw=lambda batch, tiny: call.draw((rows,), tiny))


CHOSEN = ("mean", "none", "all", "all of none")
FAMILY = Family(
    calls={f"cross_entropy {name}": call(name) for name in CHOSEN}
    | {f"linear_cross_entropy {name}": linear_call(name) for name in CHOSEN}
    | {f"linear_log_probs {name}": log_probs_call(name) for name in LOG_PROBS},
    more={
        f"{call.operator} of another ignored class": another_ignored(call)
        for call in (call("all of none"), linear_call("all of none"), log_probs_call("all"))
    },
    further={f"cross_entropy {name}, unweighted": without_weight(name) for name in OPTIONS}
    | {f"cross_entropy {name}": call(name) for name in OPTIONS if name not in CHOSEN}
    | {f"linear_cross_entropy {name}, alone": without_more(name) for name in OPTIONS},
    kernels={
        f"{reduction} {dtype}": partial(kernels, number, dtype)
        for number, reduction in enumerate(("none", "mean"))
        for dtype in (F32, BF16)
    }
    | {f"log_probs {dtype}": partial(log_probs_kernels, dtype) for dtype in (F32, BF16)},
    graphs={f"cross_entropy {name}": with_rows(call(name)) for name in CHOSEN}
    | {f"linear_cross_entropy {name}": with_rows(linear_call(name)) for name in CHOSEN}
    | {"linear_log_probs all": with_rows(log_probs_call("all"))},
    batches=((30,),),
    draws=48,
    dtypes=(F32, BF16),
    errors=ERRORS,
)
