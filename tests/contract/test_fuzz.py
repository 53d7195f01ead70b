"""Random calls of every family match its reference or raise a clear error.

`tests/<family>/fuzz.py` draws the calls. A failure prints its `Call`: add that to the examples.
AdamW and the experts have a test_fuzz.py of their own.
"""

import importlib
import importlib.util

from axes import grid
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.fuzzing import Fuzz
from fusedops.backends import FAMILIES

FUZZ: dict[str, Fuzz] = {
    family: importlib.import_module(f"{family}.fuzz").FUZZ
    for family in FAMILIES
    if importlib.util.find_spec(f"{family}.fuzz")
}
CASES = [
    (family, op, backend)
    for family, fuzz in FUZZ.items()
    for op, names in fuzz.backends.items()
    for backend in names
]
# The reference is torch's functions, which raise torch's errors.
CHECKED = [
    (family, op, backend)
    for family, op, backend in CASES
    if FUZZ[family].mistakes and backend != "reference"
]
EXAMPLES = [
    (family, why, backend)
    for family, fuzz in FUZZ.items()
    for why, call in fuzz.examples.items()
    for backend in fuzz.example_backends
]
INTERPRETED = [(family, op) for family, fuzz in FUZZ.items() for op in fuzz.interpreted]


def test_every_family_is_drawn():
    assert {*FAMILIES} - FUZZ.keys() == {"adamw", "experts"}


@grid("family,op,backend", CASES)
@given(data=st.data())
def test_as_the_reference(family, op, backend, data):
    fuzz = FUZZ[family]
    call = data.draw(fuzz.calls(op)).on(backend)
    fuzz.compare(call, fuzz.run(call, backend), backend)


@grid("family,why,backend", EXAMPLES)
def test_example(family, why, backend):
    fuzz = FUZZ[family]
    call = fuzz.examples[why].on(backend)
    fuzz.compare(call, fuzz.run(call, backend), backend)


@grid("family,op", INTERPRETED)
@settings(max_examples=settings.default.max_examples // 10)
@given(data=st.data())
def test_interpreted(family, op, data):
    fuzz = FUZZ[family]
    call = data.draw(fuzz.interpreted[op])
    fuzz.compare(call, fuzz.run(call, "triton"), "triton")


@grid("family,op,backend", CHECKED)
@given(data=st.data())
def test_mistakes_are_named(family, op, backend, data):
    fuzz = FUZZ[family]
    call = data.draw(fuzz.mistakes(op)).on(backend)
    fuzz.judge(call, fuzz.run(call, backend), backend)
