"""Random scaled_copy calls for tests/contract/test_fuzz.py."""

from functools import partial

from contract.fuzzing import (
    FLOATS,
    Call,
    Fuzz,
    Result,
    assert_as_good,
    drawn,
    evaluated,
    redrawn,
    shapes,
    with_gradients,
)
from contract.interpreter import interpreted
from hypothesis import strategies as st

from fusedops.references.scaled_copy import scaled_copy_reference
from fusedops.testing import backends


# Triton's interpreter truncates when it stores bfloat16.
BACKENDS = [name for name in backends("scaled_copy") if not interpreted(name)]


@st.composite
def calls(draw: st.DrawFn, op: str) -> Call:
    x = draw(drawn(draw(shapes(4096).filter(len)), draw(st.sampled_from(FLOATS))))
    arguments = {"x": x, "scale": draw(st.sampled_from([0.3, 1.0, 0.0, -1.0]))}
    return draw(with_gradients(op, arguments))


def compare(call: Call, result: Result, backend: str) -> None:
    exactly, eager, exact = evaluated(call, result, scaled_copy_reference)
    rounded = partial(redrawn, call, scaled_copy_reference, exactly)
    assert_as_good(result, eager, exact, rounded)


FUZZ = Fuzz(
    calls=calls,
    backends={"scaled_copy": BACKENDS},
    compare=compare,
)
