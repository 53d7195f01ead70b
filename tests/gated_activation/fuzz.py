"""Random swiglu and geglu calls for tests/contract/test_fuzz.py."""

import math
from functools import partial
from typing import Any

import torch
from contract.fuzzing import (
    FLOATS,
    RECEIVED,
    Call,
    Drawn,
    Fuzz,
    assert_as_good,
    broken,
    drawn,
    evaluated,
    redrawn,
    right_or_refused,
    shapes,
    with_gradients,
    wrong_tensors,
)
from hypothesis import strategies as st

from fusedops.references import gated_activation
from fusedops.testing import backends

OPS = ["swiglu", "geglu"]


def reference(op: str):
    return getattr(gated_activation, f"{op}_reference")


@st.composite
def calls(draw: st.DrawFn, op: str, max_size: int = 32768) -> Call:
    """Draws a call that the function's docstring allows."""
    packed = draw(st.booleans())
    shape = draw(shapes(max_size).filter(len) if packed else shapes(max_size))
    dtypes = st.sampled_from(FLOATS)
    usual = draw(dtypes)
    up_dtype = usual if draw(st.integers(0, 2)) else draw(dtypes)
    wide = (*shape[:-1], 2 * shape[-1]) if packed else shape
    arguments: dict[str, Any] = {"gate": draw(drawn(wide, usual))}
    arguments["up"] = None if packed else draw(drawn(shape, up_dtype))
    arguments |= draw(keywords(op))
    return draw(with_gradients(op, arguments, (*RECEIVED,) if shape else ("contiguous",)))


def keywords(op: str) -> st.SearchStrategy[dict[str, Any]]:
    if op == "geglu":
        return st.fixed_dictionaries({"approximate": st.sampled_from(["none", "tanh"])})
    return st.fixed_dictionaries(
        {
            "limit": st.sampled_from([None, None, 7.0, 0.5, 0.0, 1e-3, 1e30, math.inf]),
            "alpha": st.sampled_from([1.0, 1.0, 1.702, -1.0, 0.0, 1e-4, 100.0]),
            "up_offset": st.sampled_from([0.0, 0.0, 1.0, -2.5, 1e4]),
        }
    )


def wrong_values(name: str, arguments: dict[str, Any]) -> list[Any]:
    """Returns invalid values to try in place of a valid one."""
    if name in ("gate", "up"):
        like = arguments[name] or arguments["gate"]
        wrong = wrong_tensors(like)
        alone = name == "gate"  # alone on another device it is right
        return [*wrong, 1] if alone else [*wrong, 1, torch.zeros(like.shape, device="meta")]
    return {
        "limit": [-1.0, -1e-30, math.nan, -math.inf, "7", 1j],
        "alpha": ["1", None, 1j],
        "up_offset": ["1", None, 1j],
        "approximate": ["erf", "", "TANH", None, 1],
    }[name]


def compare(call: Call, ours: dict | Exception, backend: str) -> None:
    """Asserts that `ours` is as accurate as the reference in the inputs' dtype.

    Of an infinite up the reference's gradient is inf - inf where ours is infinite, as that of
    torch's silu and gelu: they add the terms of the activation's derivative first.
    """
    exactly, eager, exact = evaluated(call, ours, reference(call.op))
    rounded = partial(redrawn, call, reference(call.op), exactly)
    for key in [key for key in ours if "gradient" in key]:
        ours[key] = torch.where(ours[key].isinf() & exact[key].isnan(), torch.nan, ours[key])
    kernel = backend != "reference" and call.received == "contiguous"
    assert_as_good(ours, eager, exact, rounded, contiguous=kernel)


# What the fuzz has found, and what it draws too rarely.
EXAMPLES = {
    "an infinite up": Call(
        "geglu", {"gate": Drawn((16,), values="one inf"), "up": None}, frozenset({"gate"})
    ),
    "halves of whole vectors in rows that do not start at one": Call(
        "swiglu",
        {"gate": Drawn((5, 128), layout="start of rows"), "up": None},
        frozenset({"gate"}),
    ),
    "gate and up with strides of their own": Call(
        "geglu",
        {
            "gate": Drawn((5, 64), torch.float16, "slice of rows"),
            "up": Drawn((5, 64), torch.float16, "every second row", seed=1),
        },
        frozenset({"gate", "up"}),
        "slice of rows",
    ),
}


FUZZ = Fuzz(
    calls=calls,
    backends={op: backends(op) for op in OPS},
    compare=compare,
    mistakes=lambda op: broken(calls(op, 512), wrong_values),
    judge=right_or_refused(compare),
    examples=EXAMPLES,
    example_backends=backends("swiglu"),
)
