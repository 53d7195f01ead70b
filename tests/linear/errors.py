"""Wrong calls of linear, each with its error's text."""

import torch

from fusedops.functional import linear

ERRORS = {
    r"linear: activation must be None, 'relu', .* got 'mish'": lambda: linear(
        torch.zeros(4, 8), torch.zeros(3, 8), None, "mish"
    ),
    r"linear: activation must be None, 'relu', .* got 'none'": lambda: linear(
        torch.zeros(4, 8), torch.zeros(3, 8), None, "none"
    ),
    r"same dtype": lambda: linear(torch.zeros(4, 8), torch.zeros(3, 8).bfloat16()),
    r"cannot be multiplied": lambda: linear(torch.zeros(4, 8), torch.zeros(3, 7)),
}
OF_KERNELS = {
    r"activation must be None, 'relu', .* got 'tanh'": lambda: torch.ops.fusedops.linear_forward(
        torch.zeros(4, 8), torch.zeros(3, 8), None, "tanh", False
    ),
    r"linear_forward: weight must have shape \[N, 8\] for input \[4, 8\], got float32 \[3, 7\]": (
        lambda: torch.ops.fusedops.linear_forward(
            torch.zeros(4, 8), torch.zeros(3, 7), None, "none", False
        )
    ),
    r"linear_forward: bias must have shape \[3\], got float32 \[4\]": lambda: (
        torch.ops.fusedops.linear_forward(
            torch.zeros(4, 8), torch.zeros(3, 8), torch.zeros(4), "none", False
        )
    ),
    r"linear_backward: weight must be bfloat16 \[3, 8\] like dy, got float32 \[3, 8\]": lambda: (
        torch.ops.fusedops.linear_backward(
            torch.zeros(4, 3).bfloat16(),
            None,
            torch.zeros(3, 8),
            None,
            "none",
            [True, False, False],
        )
    ),
    r"linear_backward: dinput needs weight": lambda: torch.ops.fusedops.linear_backward(
        torch.zeros(4, 3), None, None, None, "none", [True, False, False]
    ),
}
