"""Wrong calls of the norms, each with its error's text."""

import torch

import fusedops
from fusedops.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm

ERRORS = {
    r"add_layer_norm: residual must be float32 \[4, 8\] like x, got float32 \[4, 9\]": lambda: (
        add_layer_norm(torch.zeros(4, 8), torch.zeros(4, 9))
    ),
    r"add_rms_norm: weight must have shape \[8\].*got float32 \[9\]": lambda: add_rms_norm(
        torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(9)
    ),
    r"layer_norm: input must be float32, .*got int64 \[4, 8\]": lambda: layer_norm(
        torch.zeros(4, 8, dtype=torch.int64), (8,)
    ),
    r"layer_norm: normalized_shape must be the end of .*\[4, 8\], got \[7\]": lambda: layer_norm(
        torch.zeros(4, 8), (7,)
    ),
    r"rms_norm: normalized_shape must name at least one": lambda: rms_norm(torch.zeros(4), ()),
    r"rms_norm: rounding must be 'torch' or 'llama', got 'gemma'": lambda: rms_norm(
        torch.zeros(4), (4,), rounding="gemma"
    ),
    r"add_rms_norm: dropout_p must be in \[0, 1\], got 1.5": lambda: add_rms_norm(
        torch.zeros(4), torch.zeros(4), dropout_p=1.5
    ),
    r"layer_norm: weight must be on cpu like input, got meta": lambda: layer_norm(
        torch.zeros(4), (4,), torch.zeros(4, device="meta")
    ),
    r"layer_norm: bias must be float32, .*got int32 \[4\]": lambda: layer_norm(
        torch.zeros(4), (4,), None, torch.zeros(4, dtype=torch.int32)
    ),
    r"add_rms_norm: weight must have at least one dimension, got float32 \[\]": lambda: (
        add_rms_norm(torch.zeros(4), torch.zeros(4), torch.ones(()))
    ),
    r"AddRMSNorm: x must end in normalized_shape \[12\], got \[4, 8\]": lambda: (
        fusedops.nn.AddRMSNorm(12, elementwise_affine=False)(torch.zeros(4, 8), torch.zeros(4, 8))
    ),
    r"rms_norm: output_format must be None, 'int8' or 'fp8', got 'int4'": lambda: rms_norm(
        torch.zeros(4), (4,), output_format="int4"
    ),
    r"add_rms_norm: output_format needs one normalised dimension, got \[3, 4\]": lambda: (
        add_rms_norm(
            torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.ones(3, 4), output_format="int8"
        )
    ),
    r"add_layer_norm: x must have at least 1 dimension": lambda: add_layer_norm(
        torch.zeros(()), torch.zeros(())
    ),
}
