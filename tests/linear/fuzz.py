"""Random calls of `linear` for tests/contract/test_fuzz.py, against F.linear and the activation."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from contract.fuzzing import (
    FLOATS,
    NOT_FLOATS,
    SIZES,
    Call,
    Drawn,
    Fuzz,
    Rounded,
    assert_as_good,
    attempt,
    broken,
    drawn,
    evaluated,
    ours,
    results,
    shapes,
    with_gradients,
    wrong_tensors,
)
from hypothesis import strategies as st

from fusedops.functional import linear
from fusedops.references.linear import ACTIVATIONS, linear_reference
from fusedops.testing import backends
from linear.cases import TORCHS

MOST = 1 << 19  # multiply-adds


@st.composite
def calls(draw: st.DrawFn, op: str, max_size: int = MOST) -> Call:
    """Draws a call that the function's docstring allows."""
    shape = draw(shapes(max_size // 256).filter(len))
    dtype = draw(st.sampled_from(FLOATS))
    widest = max(1, min(2000, max_size // max(1, math.prod(shape))))
    features = min(draw(st.integers(1, 9) | st.sampled_from(SIZES)), widest)
    arguments: dict[str, Any] = {
        "input": draw(drawn(shape, dtype)),
        "weight": draw(drawn((features, shape[-1]), dtype)),
        "bias": draw(st.none() | drawn((features,), dtype)),
        "activation": draw(st.sampled_from(list(ACTIVATIONS))),
    }
    return draw(with_gradients(op, arguments))


def wrong_values(name: str, arguments: dict[str, Any]) -> list[Any]:
    """Returns invalid values to try in place of a valid one."""
    if name == "activation":
        return ["mish", "", "GELU", 1]
    like = arguments[name] or Drawn(arguments["weight"].shape[:1], arguments["weight"].dtype)
    return [*wrong_tensors(like, NOT_FLOATS + FLOATS), 1]


class Stored(torch.autograd.Function):
    """Rounds z and its gradient to `dtype`: each half an ulp up or down."""

    @staticmethod
    def forward(ctx, z, dtype, draw):
        ctx.moved = lambda t: t * (1 + _signs(t, draw) * torch.finfo(dtype).eps / 2)
        return ctx.moved(z)

    @staticmethod
    def backward(ctx, dz):
        return ctx.moved(dz), None, None


def _signs(t: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(2, t.shape, generator=draw).to(t.device) * 2 - 1


def by_terms(dtype: torch.dtype, seed: int):
    """Computes the reference term by term, with redrawn roundings and stored z."""
    draw = torch.Generator().manual_seed(seed)

    def run(input, weight, bias=None, activation=None):
        z = (input.unsqueeze(-2) * weight).sum(-1)
        z = z if bias is None else z + bias
        return ACTIVATIONS[activation](Stored.apply(z, dtype, draw))

    return run


def torchs(input, weight, bias=None, activation=None):
    return TORCHS[activation](F.linear(input, weight, bias))


def reordered(seed: int):
    """Runs torch's lines with the sums' terms in another order."""
    draw = torch.Generator().manual_seed(seed)

    def run(input, weight, bias=None, activation=None):
        depth, features = (torch.randperm(n, generator=draw) for n in weight.shape[::-1])
        bias = None if bias is None else bias[features]
        y = torchs(input[..., depth], weight[features][:, depth], bias, activation)
        return y[..., features.argsort()]

    return run


def activated_exactly(input, weight, bias=None, activation=None):
    """Applies an exact activation to torch's matmul, without lucky cancellation of errors."""
    z = F.linear(input, weight, bias)
    return ACTIVATIONS[activation](z.double()).to(z.dtype)


def in_one_chain(input, weight, bias=None, activation=None):
    """Sums in float32 from the first term to the last, as a register does."""
    x, w = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (input, weight))
    z = torch.zeros((), dtype=x.dtype)
    for k in range(weight.shape[1]):
        z = z + x[..., k : k + 1] * w[:, k]
    z = z.expand(*input.shape[:-1], len(weight)) if bias is None else z + bias
    return TORCHS[activation](z.to(input.dtype))


def bias_apart(input, weight, bias=None, activation=None):
    """Rounds torch's matmul before adding the bias, which may change ReLU's gradient."""
    z = torch.matmul(input, weight.t())
    return TORCHS[activation](z if bias is None else z + bias)


def compare(call: Call, ours: dict | Exception, backend: str) -> None:
    """Asserts that `ours` is as accurate as torch's result in the inputs' dtype."""
    exactly, eager, exact = evaluated(call, ours, linear_reference, torchs)
    dtype = call.arguments["input"].dtype

    def rounded(key):
        for seed in range(4):
            with Rounded(torch.promote_types(dtype, torch.float32), seed):
                yield results(by_terms(dtype, seed), call, exactly)[key]
        for lines in (activated_exactly, in_one_chain, bias_apart):
            yield results(lines, call)[key].double()
        for seed in range(8):
            yield results(reordered(seed), call)[key].double()

    assert_as_good(ours, eager, exact, rounded)


def run(call: Call, backend: str) -> dict | Exception:
    return attempt(linear, call) if backend == "default" else ours(call, backend)


def judge(call: Call, ours: dict | Exception, backend: str) -> None:
    """Asserts that what torch takes is taken, and nothing else."""
    if call.arguments["activation"] not in ACTIVATIONS:
        assert "activation" in str(ours)
        return
    theirs = attempt(torchs, call)
    assert isinstance(ours, Exception) == isinstance(theirs, Exception), (ours, theirs)
    if not isinstance(ours, Exception):
        assert all(ours[key].shape == theirs[key].shape for key in theirs)


FUZZ = Fuzz(
    calls=calls,
    backends={"linear": [*backends("linear"), "default"]},
    compare=compare,
    run=run,
    mistakes=lambda op: broken(calls(op, 512), wrong_values),
    judge=judge,
)
