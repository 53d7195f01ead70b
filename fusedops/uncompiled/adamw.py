"""AdamW's operators in plain PyTorch, with the checks of csrc/ops/adamw."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedops.uncompiled.checks import describe, dtype_name
from fusedops.uncompiled.library import define, implement_kernel, reference

OP = "adamw_step"
KINDS, OPTIONS, SQUARE_PARTS, BLOCK, AMSGRAD = 5, 8, 256, 256, 6
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SQUARE_DTYPES = {  # of the moments' dtypes
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.int8: torch.uint8,
}

define(
    "adamw_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs,"
    " Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, Tensor(e!)[] max_exp_avg_sqs,"
    " Tensor(f!)[] scales, Tensor(g!)[] remainders, int[] kinds, float[] options, Tensor[] lrs,"
    " int seed, Tensor? squares=None, float max_grad_norm=0., Tensor? grad_scale=None,"
    " Tensor? found_inf=None, Tensor(h!)? host_table=None, Tensor(i!)? table=None) -> ()",
    "adamw_squares(Tensor[] grads) -> Tensor",
    "adamw_scale(Tensor(a!)[] grads, Tensor squares, float max_norm) -> ()",
)


def _step_check(
    params, grads, exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs, scales, remainders, kinds,
    options, lrs, seed, squares=None, max_grad_norm=0.0, grad_scale=None, found_inf=None,
    host_table=None, table=None,
):  # fmt: skip
    count, groups = len(params), len(options) // OPTIONS
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "steps": steps}
    for name, tensors in lists.items():
        _check_count(name, count, tensors)
    _check_count("kinds", KINDS * count, kinds)
    _check_count("options", groups * OPTIONS, options)
    if lrs:
        _check_count("lrs", groups, lrs)
    rest = {"max_exp_avg_sqs": max_exp_avg_sqs, "scales": scales, "remainders": remainders}
    used = dict.fromkeys(rest, 0)

    def take(name: str, why: str) -> Tensor:
        if used[name] == len(rest[name]):
            raise RuntimeError(f"{OP}: {name} must have {why}, got {len(rest[name])}")
        used[name] += 1
        return rest[name][used[name] - 1]

    for i, param in enumerate(params):
        _check_param(param, params[0])
        m, v = exp_avgs[i], exp_avg_sqs[i]
        if m.dtype not in SQUARE_DTYPES:
            raise RuntimeError(
                f"{OP}: exp_avgs must be float32, bfloat16 or int8, got {describe(m)}"
            )
        _check_like("grads", grads[i], param, param.dtype)
        _check_like("exp_avgs", m, param, m.dtype)
        _check_like("exp_avg_sqs", v, param, SQUARE_DTYPES[m.dtype])
        _check_scalar("steps", steps[i], param)
        group, rounding, _, row, _ = kinds[KINDS * i : KINDS * (i + 1)]
        row = row or param.numel()
        _check_kind(param, group, groups, rounding, row)
        if options[group * OPTIONS + AMSGRAD]:
            maximum = take("max_exp_avg_sqs", "one of each tensor with amsgrad")
            _check_like("max_exp_avg_sqs", maximum, param, torch.float32)
        if m.dtype == torch.int8:
            blocks = param.numel() // row * -(-row // BLOCK) if param.numel() else 0
            for _ in range(2):
                scale = take("scales", "two of each tensor with int8 moments")
                _check_state("scales", scale, param, torch.float32, blocks)
        if rounding == 2:
            remainder = take("remainders", "one of each tensor with rounding 2")
            _check_like("remainders", remainder, param, torch.int16)
    for name, number in used.items():
        _check_count(name, number, rest[name])
    if not count:
        return
    for lr in lrs:
        _check_scalar("lrs", lr, params[0])
    _check_scalar("grad_scale", grad_scale, params[0])
    _check_scalar("found_inf", found_inf, params[0])
    if squares is not None:
        _check_squares(OP, squares, params[0])


def _check_count(name: str, wanted: int, got: Sequence) -> None:
    if len(got) != wanted:
        raise RuntimeError(f"{OP}: {name} must have {wanted} elements, got {len(got)}")


def _check_param(param: Tensor, first: Tensor) -> None:
    if param.dtype not in FLOATS:
        raise RuntimeError(
            f"{OP}: params must be float32, float16 or bfloat16, got {describe(param)}"
        )
    if param.device != first.device:
        raise RuntimeError(
            f"{OP}: params must be on one device, got {param.device} beside {first.device}"
        )


def _check_kind(param: Tensor, group: int, groups: int, rounding: int, row: int) -> None:
    if not 0 <= group < groups:
        raise RuntimeError(f"{OP}: kinds must name one of {groups} groups, got {group}")
    if not 0 <= rounding <= 2 or (rounding == 2 and param.dtype != torch.bfloat16):
        raise RuntimeError(
            f"{OP}: kinds must name a rounding 0 to 2, 2 with bfloat16 alone, got {rounding} with "
            f"{describe(param)}"
        )
    if row != param.numel() and (row <= 0 or param.numel() % row):
        raise RuntimeError(f"{OP}: kinds must name a row that divides {describe(param)}, got {row}")


def _check_like(name: str, t: Tensor, param: Tensor, dtype: torch.dtype) -> None:
    if t.dtype != dtype or t.device != param.device or t.shape != param.shape:
        raise RuntimeError(
            f"{OP}: {name} must be {dtype_name(dtype)} {list(param.shape)} on {param.device} like "
            f"its parameter, got {describe(t)} on {t.device}"
        )


def _check_state(name: str, t: Tensor, param: Tensor, dtype: torch.dtype, numel: int) -> None:
    fits = t.dtype == dtype and t.device == param.device and t.numel() == numel
    if not fits or not t.is_contiguous():
        raise RuntimeError(
            f"{OP}: {name} must be {dtype_name(dtype)} [{numel}] on {param.device}, got "
            f"{describe(t)} on {t.device}"
        )


def _check_scalar(name: str, t: Tensor | None, param: Tensor) -> None:
    if t is None:
        return
    if t.dtype != torch.float32 or t.numel() != 1 or t.device != param.device:
        raise RuntimeError(
            f"{OP}: {name} must be a float32 scalar on {param.device}, got {describe(t)} on "
            f"{t.device}"
        )


def _check_gradients(op: str, grads: Sequence[Tensor]) -> None:
    if not grads:
        raise RuntimeError(f"{op}: grads must have a tensor, got none")
    for grad in grads:
        if grad.dtype not in FLOATS:
            raise RuntimeError(
                f"{op}: grads must be float32, float16 or bfloat16, got {describe(grad)}"
            )
        if grad.device != grads[0].device:
            raise RuntimeError(
                f"{op}: grads must be on one device, got {grad.device} beside {grads[0].device}"
            )


def _check_squares(op: str, squares: Tensor, like: Tensor) -> None:
    fits = squares.dtype == torch.float64 and squares.numel() == SQUARE_PARTS
    if not fits or not squares.is_contiguous() or squares.device != like.device:
        raise RuntimeError(
            f"{op}: squares must be float64 [{SQUARE_PARTS}] on {like.device}, got "
            f"{describe(squares)} on {squares.device}"
        )


def _squares_output(grads):
    _check_gradients("adamw_squares", grads)
    return grads[0].new_empty((SQUARE_PARTS,), dtype=torch.float64)


def _scale_check(grads, squares, max_norm):
    _check_gradients("adamw_scale", grads)
    _check_squares("adamw_scale", squares, grads[0])
    for grad in grads:
        if not torch.ops.aten.is_non_overlapping_and_dense(grad):
            raise RuntimeError(
                f"adamw_scale: grads must not overlap or have gaps, got {describe(grad)} with "
                f"strides {list(grad.stride())}"
            )


@torch.no_grad()
def _checked(check: Callable, name: str, *args, **kwargs):
    check(*args, **kwargs)
    return reference("adamw", f"{name}_reference")(*args, **kwargs)


_CHECKS: dict[str, Callable] = {
    OP: _step_check,
    "adamw_squares": _squares_output,
    "adamw_scale": _scale_check,
}
for _name, _check in _CHECKS.items():
    implement_kernel(_name, _check, functools.partial(_checked, _check, _name))
