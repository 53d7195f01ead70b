"""Wrong calls of swiglu and geglu, each with its error's text."""

import torch

from fusedops.functional import geglu, swiglu


def float32(*shape, **to):
    return torch.zeros(*shape, **to)


ERRORS = {
    r"swiglu: gate must be float32, .*got int64 \[4, 8\]": lambda: swiglu(
        float32(4, 8, dtype=torch.int64)
    ),
    r"geglu: up must be float32, .*got int32 \[4\]": lambda: geglu(
        float32(4), float32(4, dtype=torch.int32)
    ),
    r"swiglu: up must have shape \[4, 8\] like gate, got float32 \[4, 9\]": lambda: swiglu(
        float32(4, 8), float32(4, 9)
    ),
    r"geglu: up must have shape \[4, 8\] like gate, got float16 \[8\]": lambda: geglu(
        float32(4, 8), float32(8, dtype=torch.float16)
    ),
    r"swiglu: up must be on cpu like gate, got meta": lambda: swiglu(
        float32(4), float32(4, device="meta")
    ),
    r"swiglu: without up, gate must be packed, .*even size, got float32 \[4, 7\]": lambda: swiglu(
        float32(4, 7)
    ),
    r"geglu: without up, gate must be packed, .*got float32 \[\]": lambda: geglu(float32(())),
    r"geglu: approximate must be 'none' or 'tanh', got 'erf'": lambda: geglu(
        float32(4), approximate="erf"
    ),
    r"swiglu: output_format must be None, 'int8' or 'fp8', got 'nf4'": lambda: swiglu(
        float32(4), output_format="nf4"
    ),
    r"swiglu: output_format needs at least one dimension, got float32 \[\]": lambda: swiglu(
        float32(()), float32(()), output_format="int8"
    ),
    r"swiglu: limit must be at least 0, got -1": lambda: swiglu(float32(4), limit=-1.0),
    r"swiglu: limit must be at least 0, got -?nan": lambda: swiglu(float32(4), limit=torch.nan),
}
OF_KERNELS = {
    r"dy must have shape \[4, 8\] like y, got float32 \[4\]": lambda: (
        torch.ops.fusedops.gated_activation_backward(
            float32(4), float32(4, 16), None, "geglu", None, 1.0, 0.0, [True, True]
        )
    ),
    r"gated_activation: up must be Float like gate, got float16 \[4\]": lambda: (
        torch.ops.fusedops.gated_activation_forward(
            float32(4), float32(4, dtype=torch.float16), "geglu", None, 1.0, 0.0
        )
    ),
}
