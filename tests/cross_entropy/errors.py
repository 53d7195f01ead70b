"""Wrong calls of the cross-entropy functions, each with its error's text."""

import torch

from fusedops.functional import cross_entropy, linear_cross_entropy, linear_log_probs


def zeros(*shape, **to):
    return torch.zeros(shape, **to)


INT = {"dtype": torch.int64}
ERRORS = {
    r"input must be float32, .*got int64 \[3, 4\]": lambda: cross_entropy(
        zeros(3, 4, **INT), zeros(3, **INT)
    ),
    r"input must have a dimension of classes, got float32 \[\]": lambda: cross_entropy(
        zeros(), zeros(**INT)
    ),
    r"target must be int64 \[3\] like the logits .* got int64 \[2\]": lambda: cross_entropy(
        zeros(3, 4), zeros(2, **INT)
    ),
    r"target must be probabilities \[3, 4\] .* got float32 \[3\]": lambda: cross_entropy(
        zeros(3, 4), zeros(3)
    ),
    r"weight must be \[4\], one number a class, got float32 \[3\]": lambda: cross_entropy(
        zeros(3, 4), zeros(3, **INT), zeros(3)
    ),
    r"dtype must be float32 or input's, bfloat16, got float16": lambda: cross_entropy(
        zeros(3, 4).bfloat16(), zeros(3, **INT), dtype=torch.float16
    ),
    r"reduction must be 'none', 'mean' or 'sum', got 'avg'": lambda: cross_entropy(
        zeros(3, 4), zeros(3, **INT), reduction="avg"
    ),
    r"label_smoothing must be from 0 to 1, got 2": lambda: cross_entropy(
        zeros(3, 4), zeros(3, **INT), label_smoothing=2
    ),
    r"target must be on cpu like input, got meta": lambda: cross_entropy(
        zeros(3, 4), zeros(3, device="meta", **INT)
    ),
    r"linear_cross_entropy: linear_weight must have input's .* got float32 \[9, 6\]": lambda: (
        linear_cross_entropy(zeros(3, 5), zeros(9, 6), zeros(3, **INT))
    ),
    r"linear_cross_entropy: linear_bias must be float32 \[9\] .* got float32 \[8\]": lambda: (
        linear_cross_entropy(zeros(3, 5), zeros(9, 5), zeros(3, **INT), linear_bias=zeros(8))
    ),
    r"linear_cross_entropy: target must be int64 \[2, 3\] .* got int64 \[6\]": lambda: (
        linear_cross_entropy(zeros(2, 3, 5), zeros(9, 5), zeros(6, **INT))
    ),
    r"linear_log_probs: linear_weight must be \[classes, features\], got .* \[9, 2, 5\]": lambda: (
        linear_log_probs(zeros(3, 5), zeros(9, 2, 5), zeros(3, 2, **INT))
    ),
    r"linear_log_probs: target must be int64, got float32 \[3, 9\]": lambda: linear_log_probs(
        zeros(3, 5), zeros(9, 5), zeros(3, 9)
    ),
    r"linear_log_probs: temperature must be above 0 and finite, got 0": lambda: linear_log_probs(
        zeros(3, 5), zeros(9, 5), zeros(3, **INT), temperature=0.0
    ),
    r"linear_log_probs: dtype must be float32 or input's, bfloat16, got float16": lambda: (
        linear_log_probs(
            zeros(3, 5).bfloat16(), zeros(9, 5).bfloat16(), zeros(3, **INT), dtype=torch.float16
        )
    ),
}
ERRORS = {
    message if message.startswith("linear") else f"^cross_entropy: .*{message}": error
    for message, error in ERRORS.items()
}
