"""Random norm calls for tests/contract/test_fuzz.py, against torch's result.

"torch's result" is that of torch's function, or of `h = x + residual` and torch's norm for an add_*
function. Where torch has no such function (llama's rounding, an offset, dropout, more mixtures of
dtypes), our reference is used instead.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from contract.fuzzing import (
    FLOATS,
    Call,
    Drawn,
    Fuzz,
    Redrawn,
    Rounded,
    assert_as_good,
    attempt,
    broken,
    drawn,
    results,
    right_or_refused,
    says_what_is_wrong,
    shapes,
    with_gradients,
    wrong_tensors,
)
from hypothesis import strategies as st
from torch import nn

from fusedops.references import norm
from fusedops.testing import backends

OPS = ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"]
SLOW = [] if torch.cuda.is_available() else ["triton"]  # the interpreter
INTERPRETED = [op for op in OPS if set(SLOW) & set(backends(op))]

PARAMETERS = ["weight", "bias"]
EPS = [1e-5, 1e-6, 1e-12, 0.0, 0.5, 1, 1e10, -1e-3, math.inf, math.nan]


def reference(op: str):
    return getattr(norm, f"{op}_reference")


def original(call: Call):
    """Returns torch's function for a call, or None if torch has none.

    Also None for what torch accepts but our docstrings exclude: integer parameters, and a
    residual whose shape differs from x's.
    """
    arguments = call.arguments
    extras = {"rounding": "torch", "offset": 0.0, "dropout_p": 0.0}
    if any(arguments.get(name, default) != default for name, default in extras.items()):
        return None
    parameters = [arguments[name] for name in PARAMETERS if isinstance(arguments.get(name), Drawn)]
    if any(parameter.dtype not in FLOATS for parameter in parameters):
        return None
    if "add" in call.op and not alike(arguments["x"], arguments["residual"]):
        return None
    plain = nn.functional.layer_norm if "layer" in call.op else nn.functional.rms_norm

    def norm_of(input, normalized_shape, rounding=None, offset=None, **rest):
        if "layer" in call.op and input.dtype == torch.float64:  # torch takes no other parameters
            tensors = {n: t.double() for n, t in rest.items() if isinstance(t, torch.Tensor)}
            rest |= tensors
        return plain(input, normalized_shape, **rest)

    def two_lines(x, residual, weight=None, dropout_p=None, **rest):
        h = x + residual
        row = weight.shape if isinstance(weight, torch.Tensor) else h.shape[-1:]
        return norm_of(h, row, weight=weight, **rest), h

    return two_lines if "add" in call.op else norm_of


def alike(x: Any, residual: Any) -> bool:
    """Whether an add_* function computes the same as `x + residual` and torch's norm.

    It requires equal shapes. If the dtypes differ, h has the wider one and y may keep x's.
    """
    both = isinstance(x, Drawn) and isinstance(residual, Drawn)
    return both and (x.shape, x.dtype) == (residual.shape, residual.dtype) and x.dtype in FLOATS


@st.composite
def calls(draw: st.DrawFn, op: str, max_size: int = 32768, floats: tuple = tuple(FLOATS)) -> Call:
    """Draws a call that the function's docstring allows."""
    shape = draw(shapes(max_size).filter(len))
    row = shape[-draw(st.integers(1, min(len(shape), 2))) :]
    usual = draw(st.sampled_from(floats))
    dtypes = st.just(usual) if draw(st.integers(0, 2)) else st.sampled_from(floats)

    def tensor(shape):
        return draw(drawn(shape, draw(dtypes)))

    def parameter():
        return tensor(row) if draw(st.integers(0, 3)) else None

    arguments = {"x": tensor(shape), "residual": tensor(shape)}
    if "add" not in op:
        arguments = {"input": tensor(shape), "normalized_shape": row}
    arguments["weight"] = parameter()
    if "layer" in op:
        # add_layer_norm normalizes over as many dimensions as the weight has
        one_axis = len(row) == 1 or arguments["weight"] is not None
        arguments["bias"] = parameter() if one_axis or "add" not in op else None
    arguments["eps"] = draw(st.sampled_from(EPS[:3]) | st.sampled_from(EPS))
    arguments |= draw(keywords(op))
    return draw(with_gradients(op, arguments))


@st.composite
def keywords(draw: st.DrawFn, op: str) -> dict[str, Any]:
    """Draws the arguments that torch's functions do not have."""
    kwargs: dict[str, Any] = {}
    if "rms" in op:
        kwargs["rounding"] = draw(st.sampled_from(["torch", "llama"]))
        kwargs["offset"] = draw(st.sampled_from([0.0, 1.0, -2.5]))
        if draw(st.booleans()):
            kwargs["eps"] = None
    if "add" in op:
        kwargs["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.999, 1.0]))
    return kwargs


def wrong_values(name: str, arguments: dict[str, Any]) -> list[Any]:
    """Returns invalid values to try in place of a valid one."""
    value = arguments[name]
    if name == "normalized_shape":
        return [(), (*value, 1), (1, *value), (-1,), (*value[:-1], value[-1] + 1), (2**40,), 3, "8"]
    if name in ("weight", "bias", "x", "residual", "input"):
        like = value or arguments.get("x") or arguments.get("input")
        wrong = wrong_tensors(like)
        first = name in ("x", "input")  # on another device it is valid: the others may follow
        return [*wrong, 1] if first else [*wrong, 1, torch.zeros(like.shape, device="meta")]
    return {
        "eps": ["1e-5", 1j, torch.zeros(2)],
        "rounding": ["gemma", "", None, 1],
        "offset": ["1", None],
        "dropout_p": [-0.1, 1.1, math.nan, math.inf, "0.5", None],
    }[name]


def compare(call: Call, ours: dict | Exception, backend: str) -> None:
    """Asserts that `ours` is as accurate as torch's result, or as the reference's."""
    if isinstance(ours, Exception):
        raise ours
    eager = attempt(original(call) or reference(call.op), call)
    if isinstance(eager, Exception):
        eager = results(reference(call.op), call)
    exactly = in_float64(call)
    exact = results(reference(call.op), call, exactly)

    def rounded(key):
        for seed in range(8):
            with Rounded(accumulator(call), seed):
                yield results(reference(call.op), call, exactly)[key]
            with Redrawn(seed):
                yield results(reference(call.op), call)[key].double()
        for stored in stored_sum_arguments(call, exactly) if "add" in call.op else ():
            yield results(reference(call.op), call, stored)[key]

    kernel = backend != "reference" and call.received == "contiguous"
    assert_as_good(ours, eager, exact, rounded, contiguous=kernel)


def in_float64(call: Call) -> dict[str, Any]:
    """Returns the arguments in float64, with the original dtype's default eps."""
    exact = call.in_float64()
    if exact.get("eps", 0) is None:
        exact["eps"] = torch.finfo(accumulator(call)).eps
    return exact


def stored_sum_arguments(call: Call, exactly: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields float64 arguments whose x + residual is an h that a kernel may store.

    Every kernel rounds h to its dtype, and norm and gradients are those of the rounded h. A kernel
    may round once, or a second time after the dropout, as torch's lines do.
    """
    alone = replace(call, grads=frozenset(), received="contiguous")
    stored, exact = (
        results(reference(call.op), alone, arguments)["output 1"] for arguments in (None, exactly)
    )
    for h in (stored, exact.to(stored.dtype)):
        yield exactly | {"residual": exactly["residual"] + (h.double() - exact)}


def accumulator(call: Call) -> torch.dtype:
    """Returns the statistics' dtype: float32, or float64 for float64 rows."""
    rows = [call.arguments.get(name) for name in ("input", "x", "residual")]
    wide = any(t is not None and t.dtype == torch.float64 for t in rows)
    return torch.float64 if wide else torch.float32


# Calls that the fuzz found to fail once, and calls that it draws too rarely.
EXAMPLES = {
    "equal elements do not have a negative variance": Call(
        "layer_norm",
        {"input": Drawn((3,), values="large constant"), "normalized_shape": (3,), "eps": 1e-5},
    ),
    "overflowing squares make the variance infinite, not NaN": Call(
        "add_layer_norm", {"x": Drawn((15,)), "residual": Drawn((15,), values="huge"), "eps": 1e-5}
    ),
    "overflowing squares in rows of several tiles do the same": Call(
        "layer_norm",
        {"input": Drawn((2, 20011), values="huge"), "normalized_shape": (20011,), "eps": 1e-5},
    ),
    "a dropped NaN stays NaN, as in torch": Call(
        "add_rms_norm",
        {"x": Drawn((8, 5), values="one NaN"), "residual": Drawn((8, 5)), "dropout_p": 0.999},
    ),
    "the sum with a dropped x is rounded once": Call(
        "add_layer_norm",
        {
            "x": Drawn((1000, 15), torch.float16),
            "residual": Drawn((1000, 15), torch.float16, seed=7),
            "weight": Drawn((15,), torch.float16, values="one inf"),
            "eps": 1e-5,
            "dropout_p": 0.1,
        },
        frozenset({"residual"}),
    ),
    "an infinite gradient has one sign, in both parts of rstd": Call(
        "rms_norm",
        {
            "input": Drawn((16,)),
            "normalized_shape": (16,),
            "weight": Drawn((16,), values="one inf"),
            "eps": 1e-5,
        },
        frozenset({"input"}),
    ),
    "rows have whole vectors but start misaligned": Call(
        "layer_norm",
        {"input": Drawn((5, 64), layout="start of rows"), "normalized_shape": (64,), "eps": 1e-5},
        frozenset({"input"}),
    ),
    "dropout runs on whole vectors": Call(
        "add_layer_norm",
        {
            "x": Drawn((5, 64), torch.float16),
            "residual": Drawn((5, 64), torch.float16, seed=1),
            "dropout_p": 0.5,
        },
        frozenset({"x"}),
    ),
}


def refused(call: Call, error: Exception) -> None:
    """Asserts that torch refuses the call too, and that our error says what is wrong."""
    theirs = original(call)
    assert theirs is None or isinstance(attempt(theirs, call), Exception), (
        f"torch takes it: {error}"
    )
    assert says_what_is_wrong(call, str(error)), error


# The interpreter truncates when it stores bfloat16.
SMALL = {op: calls(op, 256, (torch.float32, torch.float16)) for op in INTERPRETED}
FUZZ = Fuzz(
    calls=calls,
    backends={op: [name for name in backends(op) if name not in SLOW] for op in OPS},
    compare=compare,
    mistakes=lambda op: broken(calls(op, 512), wrong_values),
    judge=right_or_refused(compare, refused),
    examples=EXAMPLES,
    example_backends=backends("layer_norm"),
    interpreted=SMALL,
)
