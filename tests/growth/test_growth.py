"""Memory and live tensors stay constant from call 20 to call 80.

`make growth` measures from call 100 to call 300, in all of WAYS; `make test` calls in four of them.
"""

import ctypes
import gc
import itertools
import logging
import os
import warnings

import pytest
import torch
from calling import kernels

from fusedops import backends, functional, nn, optim
from growth.families import MODULES, OPERATORS
from growth.measure import CALLS, WARM, Watch, complaints, growth, mallinfo2
from growth.models import LIVES, LONG_LIVES, STEPS
from growth.optimizers import KINDS, OPTIMIZERS
from growth.subject import Subject, leaf, nn_module
from growth.ways import WAYS, training

EVERY = os.environ.get("FUSEDOPS_GROWTH") == "every"
SUBJECTS = OPERATORS | MODULES | STEPS
CALLED = list(WAYS) if EVERY else list(WAYS)[:4]
LENGTHS = (WARM, CALLS) if EVERY else (20, 80)
ROUTINES = OPTIMIZERS | LIVES | (LONG_LIVES if EVERY else {})

pytestmark = [
    pytest.mark.skipif(mallinfo2 is None, reason="glibc alone says what is allocated"),
    pytest.mark.usefixtures("any_size", "nothing_recorded"),
]


@pytest.fixture
def nothing_recorded():
    """Stops pytest from keeping warnings and log lines."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def applies(way, name):
    """Whether a way applies to a subject: only modules can be copied."""
    return way != "copies" or name not in OPERATORS


CASES = [(way, name) for way, name in itertools.product(CALLED, SUBJECTS) if applies(way, name)]


@pytest.mark.parametrize("way,name", CASES)
def test_calls(way, name):
    subject, watch, parameters = SUBJECTS[name](), Watch(), Watch()
    if way in subject.left:
        pytest.skip(subject.left[way])
    with subject.around():
        grown = growth(WAYS[way](subject, watch), watch, *LENGTHS)
    assert not complaints(grown)
    parameters(*subject.parameters())
    del subject
    leaf().backward()  # until then torch keeps what an interrupted backward left undone
    gc.collect()
    assert len(parameters) == 0, "parameters outlive their module"


@pytest.mark.parametrize("name", ROUTINES)
def test_routines(name):
    watch = Watch()
    assert not complaints(growth(ROUTINES[name](watch), watch, *LENGTHS))


def public(names):
    """Returns the functions or classes that the subjects call."""
    return {name.partition(",")[0] for name in names}


def test_every_public_name_is_called():
    assert public(OPERATORS) == set(functional.__all__)
    changes = {"codes_as_buffers", "codes_as_parameters"}  # of modules; they compute nothing
    assert public(MODULES) == set(nn.__all__) - changes
    assert public(KINDS) == set(optim.__all__)


@pytest.fixture(scope="module")
def reached():
    """Returns the kernels that run in public functions and optimizers' steps."""
    names = set()
    for name in OPERATORS:
        subject = OPERATORS[name]()
        with subject.around():
            names |= kernels(training(subject, Watch()))
    return names | kernels(*(OPTIMIZERS[f"{kind}: steps"](Watch()) for kind in KINDS))


@pytest.mark.parametrize("family", backends.FAMILIES)
def test_calls_reach_the_kernels(family, reached):
    """Despite small sizes, no subject falls back to torch's own code."""
    on_cpu = {name for name in backends.kernels(family) if backends._is_kernel(name, "CPU")}
    assert on_cpu and on_cpu <= reached


# Leaks that the tests must see.


def keeping(kept, function):
    def run(*inputs):
        outputs = function(*inputs)
        kept.append(outputs)
        return outputs

    return run


def test_a_kept_output_is_seen():
    kept = []
    subject = Subject(keeping(kept, torch.relu), lambda: [leaf(16, 64)])
    watch = Watch()
    grown = growth(training(subject, watch), watch, *LENGTHS)
    assert grown["bytes"] > 100 * 16 * 64 * 4 and grown["tensors"] >= 100 <= grown["watched"]
    assert complaints(grown)


def test_memory_that_no_tensor_has_is_seen():
    malloc = ctypes.CDLL(None).malloc
    grown = growth(lambda: malloc(600), Watch(), *LENGTHS)
    assert len(complaints(grown)) == 1 and "bytes" in complaints(grown)[0]


def test_a_kept_object_is_seen():
    kept = []
    grown = growth(lambda: kept.append([None]), Watch(), *LENGTHS)
    assert "objects" in complaints(grown)[0]


def test_what_is_flat_is_not_reported():
    watch = Watch()
    subject = nn_module(torch.nn.Linear(64, 8), lambda: [leaf(16, 64)])
    assert not complaints(growth(training(subject, watch), watch, *LENGTHS))
