"""Random calls of quantized_linear for tests/contract/test_fuzz.py."""

import importlib
import math
from typing import Any

import torch
from contract.fuzzing import (
    FLOATS,
    NOT_FLOATS,
    SIZES,
    Call,
    Drawn,
    Fuzz,
    Rounded,
    assert_as_good,
    broken,
    drawn,
    evaluated,
    results,
    says_what_is_wrong,
    shapes,
    with_gradients,
)
from hypothesis import strategies as st
from linear.cases import TORCHS

from fusedops.references.linear import ACTIVATIONS
from fusedops.testing import backends
from quantized_linear.cases import FORMATS, PRECISIONS, quantized, random_weight

family = importlib.import_module("fusedops.references.quantized_linear")
SLOW = [] if torch.cuda.is_available() else ["triton"]  # the interpreter
BACKENDS = [name for name in backends("quantized_linear") if name not in SLOW]
MOST = 1 << 18  # multiply-adds


@st.composite
def calls(draw: st.DrawFn, op: str, max_size: int = MOST) -> Call:
    """Draws a call that the function's docstring allows."""
    shape = draw(shapes(max_size // 256).filter(len))
    dtype = draw(st.sampled_from(FLOATS))
    widest = max(1, min(2000, max_size // max(1, math.prod(shape))))
    features = min(draw(st.integers(1, 9) | st.sampled_from(SIZES)), widest)
    kind = draw(st.sampled_from(list(FORMATS)))
    input_format, compute = draw(st.sampled_from(PRECISIONS))
    arguments: dict[str, Any] = {
        "x": draw(drawn(shape, dtype)),
        "qweight": quantized(kind, random_weight(features, shape[-1])),
        "bias": draw(st.none() | drawn((features,), dtype)),
        "activation": draw(st.sampled_from(list(ACTIVATIONS))),
        "input_format": input_format,
        "compute": compute,
    }
    return draw(with_gradients(op, arguments))


def wrong_values(name: str, arguments: dict[str, Any]) -> list[Any]:
    """Invalid values to try in place of a valid one."""
    if name not in ("x", "bias"):
        return ["mish", "", "INT8", 1]
    like = arguments[name] or Drawn((arguments["qweight"].out_features,), arguments["x"].dtype)
    shape = like.shape
    others = [(), (*shape, shape[-1] + 1), (*shape[:-1], shape[-1] + 1)]
    wrong: list[Any] = [Drawn(s, like.dtype) for s in others]
    wrong += [Drawn(shape, dtype) for dtype in NOT_FLOATS]
    return [*wrong, 1]


def reference(x, qweight, bias=None, **settings):
    return reordered(None)(x, qweight, bias, **settings)


def reordered(seed: int | None):
    """Returns the reference, with the terms of its sums in another order where there is a seed."""

    def run(x, qweight, bias=None, activation=None, input_format=None, compute=None):
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = qweight.qweight, qweight.scales, qweight.zeros, qweight.format, *qweight.shape
        weight, factors = family.operands_reference(*parts, qweight.group_size, wide)
        settings = activation, input_format, compute
        if seed is None:
            return family.product_reference(x, weight, factors, bias, *settings)
        draw = torch.Generator().manual_seed(seed)
        depth, features = (torch.randperm(n, generator=draw) for n in weight.shape[::-1])
        bias, factors = (t if t is None else t[features] for t in (bias, factors))
        weight = weight[features][:, depth]
        y = family.product_reference(x[..., depth], weight, factors, bias, *settings)
        return y[..., features.argsort()]

    return run


def activated_by_torch(seed: int):
    """Returns the same with torch's activations, whose formulas cancel in their tails."""

    def run(x, qweight, bias=None, activation=None, **settings):
        return TORCHS[activation](reordered(seed)(x, qweight, bias, **settings))

    return run


def compare(call: Call, ours: dict | Exception, backend: str) -> None:
    """Assert that what we give is as good as what the reference gives in the inputs' dtype."""
    exactly, eager, exact = evaluated(call, ours, reference)
    arguments = call.made()
    dtype = torch.promote_types(arguments["x"].dtype, torch.float32)

    def rounded(key):
        """Rounded again, in other orders, and as if only stored values were rounded."""
        for seed in range(4):
            with Rounded(dtype, seed):
                yield results(reference, call, exactly)[key]
        for compute in (call.arguments["compute"], "exact"):
            for seed in range(6):
                changed = arguments | {"compute": compute}
                yield results(reordered(seed), call, changed)[key].double()
                yield results(activated_by_torch(seed), call, changed)[key].double()

    assert_as_good(ours, eager, exact, rounded)


def judge(call: Call, ours: dict | Exception, backend: str) -> None:
    assert isinstance(ours, Exception) and says_what_is_wrong(call, str(ours))


FUZZ = Fuzz(
    calls=calls,
    backends={"quantized_linear": BACKENDS},
    compare=compare,
    mistakes=lambda op: broken(calls(op, 512), wrong_values, "qweight"),
    judge=judge,
)
