"""Random scaled_copy calls match the reference."""

from functools import partial

import pytest
from contract.fuzzing import (
    FLOATS,
    assert_as_good,
    drawn,
    evaluated,
    ours,
    redrawn,
    shapes,
    with_gradients,
)
from hypothesis import given
from hypothesis import strategies as st

from fusedops.references.scaled_copy import scaled_copy_reference
from scaled_copy.cases import CASES

DTYPES = {name: [dtype for b, dtype in CASES if b == name] for name, _ in CASES}


@pytest.mark.parametrize("backend,dtypes", [*DTYPES.items(), ("composite", FLOATS)])
@given(data=st.data())
def test_as_the_reference(backend, dtypes, data):
    x = drawn(data.draw(shapes(4096).filter(len)), data.draw(st.sampled_from(dtypes)))
    arguments = {"x": data.draw(x), "scale": data.draw(st.sampled_from([0.3, 1.0, 0.0, -1.0]))}
    call = data.draw(with_gradients("scaled_copy", arguments)).on(backend)
    found = ours(call, backend)
    exactly, eager, exact = evaluated(call, found, scaled_copy_reference)
    assert_as_good(found, eager, exact, partial(redrawn, call, scaled_copy_reference, exactly))
