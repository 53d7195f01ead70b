"""Checks of operators whose outputs are rows of codes with a scale for each row."""

import torch
from torch import Tensor

import fusedops
from fusedops.functional.quantized_rows import LARGEST, ROW_CODES
from fusedops.testing import device_of, placed, poisoned, yardstick

FORMATS = list(ROW_CODES)
MOST_FLIPPED = 2e-3  # of the codes: those that float32's rounding moves over a middle


def ordered(codes: Tensor) -> Tensor:
    """Codes as integers in which neighbours differ by 1."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def dequantized(pair: tuple[Tensor, Tensor]) -> Tensor:
    codes, scale = pair
    return codes.float() * scale


def defined(y: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The definition in float64: codes and scale of rows y."""
    scale = y.abs().amax(-1, keepdim=True) / LARGEST[format]
    codes = torch.where(scale == 0, 0, y / scale)
    codes = codes.round() if format == "int8" else codes
    return codes.to(ROW_CODES[format]), scale


def check_rows(found: tuple, eager: tuple, exact: Tensor, format: str) -> None:
    """found, eager: pairs of the kernel and of the reference. exact: the rows in float64."""
    codes, scale = found
    assert codes.dtype == ROW_CODES[format] and scale.dtype == torch.float32
    assert codes.shape == exact.shape and scale.shape == (*exact.shape[:-1], 1)
    assert codes.is_contiguous() and scale.is_contiguous()
    if not exact.numel():
        assert not scale.any()
        return
    wanted, wanted_scale = defined(exact, format)
    torch.testing.assert_close(scale.double(), wanted_scale, rtol=3e-6, atol=0)
    apart = (ordered(codes) - ordered(wanted)).abs()
    assert apart.max() <= 1 and (apart > 0).sum() <= 1 + MOST_FLIPPED * apart.numel()
    complaint = yardstick(dequantized(found), dequantized(eager), exact)
    assert complaint is None, complaint


def run_on(backend: str, function, args: tuple, **options):
    with fusedops.backend(backend), poisoned():
        return function(*placed(args, device_of(backend)), **options)


def wide(args: tuple) -> tuple:
    """The arguments in float64."""
    return tuple(
        a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    )
