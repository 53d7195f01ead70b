"""Shared helpers for cross-entropy tests: arguments, options, comparison with the reference."""

import pytest
import torch
from contract.interpreter import interpreted

from fusedops.functional import cross_entropy, linear_cross_entropy
from fusedops.references.cross_entropy import (
    cross_entropy_reference,
    linear_cross_entropy_reference,
)
from fusedops.testing import backends, check, device_of

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = [name for name in backends("cross_entropy") if name != "reference"]
F32 = torch.float32

# Name: keywords.
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.02, "reduction": "none"},
    "scaled": {"scale": 0.3},
    "capped": {"softcap": 3.0},
    "all": {"softcap": 5.0, "scale": 2.0, "z_loss": 0.02, "label_smoothing": 0.3},
    "all of none": {"softcap": 5.0, "scale": 0.4, "label_smoothing": 0.3, "reduction": "none"},
}


# Whether CPUs multiply bfloat16 as such.
PRODUCTS = pytest.mark.parametrize(
    "products",
    [False, True],
    ids=["float32 products", "bfloat16 products"],
    indirect=["products"],
)


def runs(backend, dtype=F32, shape=(1, 1), products=False, **_):
    """Whether a case is neither bfloat16 nor slow in Triton's interpreter, and has the products."""
    rows, classes = shape[0], shape[-1]
    if interpreted(backend):
        large = rows > 60 or rows * classes > (25000 if dtype == F32 else 2000)
        return dtype != torch.bfloat16 and not large and not products
    return not products or (backend == "cpu" and dtype != F32)


def targets(rows, classes, ignored=True, seed=3):
    """Returns targets; some are ignored if there are enough."""
    draw = torch.Generator().manual_seed(seed)
    target = torch.randint(0, max(classes, 1), (rows,), generator=draw)
    if ignored and rows > 2:
        target[1 :: rows // 2] = -100
    return target


def logits(rows, classes, dtype=F32, offset=0.0):
    draw = torch.Generator().manual_seed(4)
    return (torch.randn(rows, classes, generator=draw) * 3 + offset).to(dtype)


def class_weight(classes, dtype=F32):
    return (torch.rand(classes, generator=torch.Generator().manual_seed(5)) + 0.1).to(dtype)


def head(rows, features, classes, dtype=F32):
    """Returns input, linear_weight and linear_bias."""
    draw = torch.Generator().manual_seed(6)
    x = torch.randn(rows, features, generator=draw)
    w = torch.randn(classes, features, generator=draw) * 3 / max(features, 1) ** 0.5
    return x.to(dtype), w.to(dtype), torch.randn(classes, generator=draw).to(dtype)


def in_dtype_of(x, t):
    """Class weights follow the logits into float64; they have no gradient."""
    return (
        None if t is None else t.to(x.device, torch.float64 if x.dtype == torch.float64 else None)
    )


def compare(args, backend, weight=None, **options):
    """Checks cross_entropy against its reference. args: logits and targets.

    Eager's sums are drawn again with other orders of the classes.
    """

    def with_weight(run):
        return lambda x, t: run(x, t, in_dtype_of(x, weight), **options)

    def ordered(seed):
        order = torch.randperm(args[0].shape[-1], generator=torch.Generator().manual_seed(seed))

        def run(x, t):
            here, weights = order.to(x.device), in_dtype_of(x, weight)
            if t.is_floating_point():
                t = t[..., here]
            else:
                t = torch.where(t < 0, t, here.argsort()[t.clamp(min=0)])
            return cross_entropy_reference(
                x[..., here], t, None if weights is None else weights[here], **options
            )

        return run

    draws = [] if "ignore_index" in options else [ordered(seed) for seed in range(8)]
    check(with_weight(cross_entropy), with_weight(cross_entropy_reference), args, backend, draws)


def compare_linear(args, backend, weight=None, **options):
    """args: input, linear_weight, targets and, if there is one, linear_bias. Eager's roundings are
    drawn anew by other orders of the features."""

    def of(run, order=slice(None)):
        def called(x, w, t, b=None):
            in_order = x[..., order], w[..., order]
            return run(*in_order, t, linear_bias=b, weight=in_dtype_of(x, weight), **options)

        return called

    reference = linear_cross_entropy_reference
    orders = (torch.randperm(args[0].shape[-1]).to(device_of(backend)) for _ in range(8))
    draws = (of(reference, order) for order in orders)
    check(of(linear_cross_entropy), of(reference), args, backend, draws)
