"""Wrong calls of `experts` and its kernels, each with its error's text."""

import torch

from experts.cases import Shape, inputs
from fusedops.functional import experts


def wrong(place=None, value=None, **options):
    """A call with one argument replaced: by place, or by a keyword."""

    def call():
        *args, _, _ = inputs(Shape(4, 2, 3, 8, 6))
        if place is not None:
            args[place] = value
        return experts(*args, **options)

    return call


def float64_call(choice):
    """A call without a kernel, one of whose choices is replaced."""
    hidden, index, *rest, _, _ = inputs(Shape(4, 2, 3, 8, 6), torch.float64)
    index[3, 1] = choice
    return lambda: experts(hidden, index, *rest)


def forward(**changed):
    """The kernel operator's forward, with changed options."""
    options = {"activation": "silu", "gated": True, "interleaved": False, "transposed": False}
    options |= {"limit": None, "alpha": 1.0, "up_offset": 0.0, "keep_z": False} | changed
    return torch.ops.fusedops.experts_forward(*inputs(Shape(4, 2, 3, 8, 6)), **options)


def backward(dy, z, mask):
    args = inputs(Shape(4, 2, 3, 8, 6))
    options = ("silu", True, False, False, None, 1.0, 0.0)
    return torch.ops.fusedops.experts_backward(dy, *args, *options, z, mask)


DY, Z = torch.zeros(4, 8), torch.zeros(8, 12)
ERRORS = {
    r"experts: activation must be None, 'relu', .* got 'mish'": wrong(activation="mish"),
    r"experts: limit must be at least 0, got -1": wrong(limit=-1.0),
    r"experts: limit, up_offset and interleaved need gated=True": wrong(gated=False, limit=1.0),
    r"experts: alpha needs activation='silu', got alpha 2": wrong(alpha=2.0, activation="gelu"),
    r"experts: hidden must be \[tokens, H\], got float32 \[2, 4, 8\]": wrong(
        0, torch.zeros(2, 4, 8)
    ),
    r"experts: top_k_index must be int64 \[4, k\], got int32 \[4, 2\]": wrong(
        1, torch.zeros(4, 2, dtype=torch.int32)
    ),
    r"experts: top_k_index must be from 0 to 3, got 4": wrong(1, torch.full((4, 2), 4)),
    r"experts: top_k_index must be from 0 to 3, got -2": float64_call(-2),
    r"experts: top_k_index must be from 0 to 3, got -1": wrong(1, torch.full((4, 2), -1)),
    r"experts: top_k_index must be from 0 to 3, got 5": float64_call(5),
    r"experts: top_k_weights must have shape \[4, 2\], got float32 \[4, 3\]": wrong(
        2, torch.zeros(4, 3)
    ),
    r"experts: gate_up must have 3 dimensions, got float32 \[12, 8\]": wrong(3, torch.zeros(12, 8)),
    r"experts: gate_up must have shape \[3, 12, 8\], got float32 \[3, 12, 9\]": wrong(
        3, torch.zeros(3, 12, 9)
    ),
    r"experts: down must be bfloat16 .* like hidden, got float32": lambda: experts(
        *(t.bfloat16() if t.is_floating_point() else t for t in inputs(Shape(4, 2, 3, 8, 6))[:3]),
        *inputs(Shape(4, 2, 3, 8, 6))[3:5],
    ),
    r"experts: gate_up_bias must have shape \[3, 12\], got float32 \[12\]": wrong(
        gate_up_bias=torch.zeros(12)
    ),
    r"experts: down_bias must have shape \[3, 8\], got float32 \[3, 6\]": wrong(
        down_bias=torch.zeros(3, 6)
    ),
}
OF_KERNELS = {
    r"activation must be None, 'relu', .* got 'tanh'": lambda: forward(activation="tanh"),
    r"experts_backward: dy must have shape \[4, 8\], got float32 \[4, 9\]": lambda: backward(
        torch.zeros(4, 9), Z, [True] * 4 + [False] * 2
    ),
    r"experts_backward: z must have shape \[8, 12\], got float32 \[8, 6\]": lambda: backward(
        DY, torch.zeros(8, 6), [True] * 4 + [False] * 2
    ),
    r"experts_backward: the gradient of a bias needs that bias": lambda: backward(
        DY, Z, [True] * 5 + [False]
    ),
    r"the gradient of a bias needs that bias": lambda: backward(DY, Z, [True] * 4 + [False, True]),
}
