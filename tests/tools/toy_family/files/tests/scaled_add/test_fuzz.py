"""Random scaled_add calls match the reference."""

from typing import Any

import pytest
import torch
from contract.fuzzing import (
    FLOATS,
    NOT_OURS,
    RECEIVED,
    Call,
    Rounded,
    assert_as_good,
    drawn,
    ours,
    results,
    shapes,
)
from hypothesis import given
from hypothesis import strategies as st

from fusedops.functional.scaled_add import scaled_add_reference
from fusedops.testing import backends
from scaled_add.cases import right

CASES = [*backends("scaled_add"), "composite"]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A call that the function's docstring allows."""
    shape, dtype = draw(shapes(4096)), draw(st.sampled_from(FLOATS[:3]))
    tensors: dict[str, Any] = {n: draw(drawn(shape, dtype)) for n in ("x", "residual")}
    scale = draw(st.sampled_from([1.0, 0.0, -1.0, 0.3, 1e3]))
    received = draw(st.sampled_from(list(RECEIVED))) if shape else "contiguous"
    return Call("scaled_add", tensors | {"scale": scale}, frozenset(tensors), received)


@pytest.mark.parametrize("backend", CASES)
@given(call=calls())
def test_as_the_reference(backend, call):
    call = call if backend == "composite" else call.on(backend)
    x, residual, scale = call.made().values()
    if backend != "composite" and not right(backend, x.dtype):
        return
    exactly = {"x": x.double(), "residual": residual.double(), "scale": scale}
    found = ours(call, backend)
    if isinstance(found, Exception):
        raise found
    eager, exact = (results(scaled_add_reference, call, made) for made in (None, exactly))

    def rounded(key):
        for seed in range(4):
            with Rounded(torch.float32, seed):
                yield results(scaled_add_reference, call, exactly)[key]

    kernel = backend not in NOT_OURS and call.received == "contiguous"
    assert_as_good(found, eager, exact, rounded, contiguous=kernel)
