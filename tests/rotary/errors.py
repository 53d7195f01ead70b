"""Wrong calls of rotary_embedding and its kernels, each with its error's text."""

import torch

from fusedops.functional import rotary_embedding


def zeros(*shape, **to):
    return torch.zeros(shape, **to)


def call(q=(2, 3, 5, 8), k=(2, 2, 5, 8), cos=(2, 5, 8), sin=None, **options):
    sin = cos if sin is None else sin
    tensors = [x if isinstance(x, torch.Tensor) else zeros(*x) for x in (q, k, cos, sin)]
    return lambda: rotary_embedding(*tensors, **options)


backward = torch.ops.fusedops.rotary_backward
ERRORS = {
    r"q must be float32, .*got int64 \[2, 3, 5, 8\]": call(zeros(2, 3, 5, 8, dtype=torch.int64)),
    r"sin must be float32, .*got uint8 \[2, 5, 8\]": call(sin=zeros(2, 5, 8, dtype=torch.uint8)),
    r"cos must have a last dimension of even size, got float32 \[2, 5, 7\]": call(cos=(2, 5, 7)),
    r"sin must have shape \[2, 5, 8\] like cos, got float32 \[2, 5, 6\]": call(sin=(2, 5, 6)),
    r"q must have at least 10 elements .* like cos, got float32 \[2, 3, 5, 8\]": call(
        cos=(2, 5, 10)
    ),
    r"k must have at least 8 elements .* like cos, got float32 \[\]": call(k=()),
    r"q must broadcast with cos, float32 \[2, 4, 8\] unsqueezed at 1, got .* \[2, 3, 5, 8\]": call(
        cos=(2, 4, 8)
    ),
    r"q must broadcast with cos, .* unsqueezed at 2, got float32 \[2, 3, 5, 8\]": call(
        unsqueeze_dim=2
    ),
    r"k must broadcast with cos, .* got float32 \[2, 2, 6, 8\]": call(k=(2, 2, 6, 8)),
    r"unsqueeze_dim must be .* float32 \[2, 5, 8\], from -4 to 2 and not -1, got 3": call(
        unsqueeze_dim=3
    ),
    r"unsqueeze_dim must be .* and not -1, got -1$": call(unsqueeze_dim=-1),
    r"k must be on cpu like cos, got meta": call(k=zeros(2, 2, 5, 8, device="meta")),
    r"sin must be on cpu like cos, got meta": call(sin=zeros(2, 5, 8, device="meta")),
}
OF_KERNELS = {
    r"rotary_forward: q .* must have equal shapes except for heads": lambda: (
        torch.ops.fusedops.rotary_forward(
            zeros(1, 1, 5, 8), zeros(1, 5, 8), zeros(5, 8), zeros(5, 8), 0, False
        )
    ),
    r"rotary_backward: dq or dk must be given, got neither": lambda: backward(
        None, None, zeros(5, 8), zeros(5, 8), 0, False, torch.float32
    ),
    r"rotary_backward: dq and dk must be Float, .* got float16 \[1, 5, 8\]": lambda: backward(
        zeros(1, 5, 8).half(), None, zeros(5, 8), zeros(5, 8), 0, False, torch.float32
    ),
    r"rotary_backward: dtype must be floating-point, got Short": lambda: backward(
        zeros(1, 5, 8), None, zeros(5, 8), zeros(5, 8), 0, False, torch.int16
    ),
}
ERRORS = {f"^rotary_embedding: .*{message}": error for message, error in ERRORS.items()}
