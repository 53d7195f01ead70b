"""Chooses quantized_linear's GPU kernel, with csrc/ops/quantized_linear/gpu_kernel.cpp's rules."""

from fusedops.uncompiled.library import export

GEMV_ROWS = 4
TENSOR_ROWS = 16
SPLIT_ROWS = 64
TILE_ROWS = 1024
most_integers = export(65536, "most_integers")


@export
def quantized_linear_plan(
    format: str, n: int, k: int, group_size: int, rows: int, input_format: str, compute: str
) -> str:
    """Describes how a CPU multiplies; empty, since PyTorch does it."""
    return ""


@export
def quantized_linear_gpu_kernel(rows: int, input_format: str, compute: str) -> str:
    return _kernel(rows, input_format, compute, GEMV_ROWS)


@export
def quantized_linear_few_rows(
    format: str, n: int, k: int, group_size: int, input_format: str, compute: str, narrow: bool
) -> int:
    if not narrow or input_format != "none" or max(k, n * k // 8) > 2**31 - 1:
        return GEMV_ROWS
    if format == "int8" and k % 64 == 0 and group_size >= k:
        return TENSOR_ROWS
    if format == "nf4" and compute in ("any", "bf16") and k % 128 == 0:
        return TENSOR_ROWS
    by_group = {32: 8, 64: TENSOR_ROWS, 128: TENSOR_ROWS}
    return by_group.get(group_size, GEMV_ROWS) if format == "int4" and k % 128 == 0 else GEMV_ROWS


@export
def quantized_linear_gpu_plan(
    format: str, n: int, k: int, group_size: int, rows: int, input_format: str, compute: str,
    few: int,
) -> str:  # fmt: skip
    kernel = _kernel(rows, input_format, compute, few)
    if kernel == "gemv":
        operands = "operands of tensor cores" if few > GEMV_ROWS else "float32"
        return (
            f"a CUDA C++ kernel, whose codes become {operands} in registers, of at most {few} rows "
            "of input"
        )
    if kernel == "scratch":
        return (
            f"the weight becomes bfloat16 in memory for each call, {n * k * 2 >> 20} MiB, and "
            f"torch multiplies it, from {TILE_ROWS + 1} rows of input on"
        )
    operand = _operand(format, k, group_size, input_format, compute)
    kernel = f"a Triton kernel, whose tiles multiply {operand}"
    if kernel == "split":
        return (
            f"{kernel} and share their depth where there are few, of at most {SPLIT_ROWS} rows of "
            "input"
        )
    return f"{kernel}, from {SPLIT_ROWS + 1} rows of input on"


def _kernel(rows: int, input_format: str, compute: str, few: int) -> str:
    if rows <= few:
        return "gemv"
    if rows <= SPLIT_ROWS:
        return "split"
    narrow = compute in ("any", "bf16")
    return "tiles" if rows <= TILE_ROWS or not narrow or input_format != "none" else "scratch"


def _operand(format: str, k: int, group_size: int, input_format: str, compute: str) -> str:
    if input_format == format == "int8" and group_size >= k and k <= most_integers:
        return "int8"
    if input_format == format == "fp8" and compute != "exact":
        return "float8_e4m3fn (before sm_89 bfloat16)"
    return "float32" if compute in ("exact", "int8") else "bfloat16"
