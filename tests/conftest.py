"""pytest's setup: environment, test order, shared fixtures; Triton is interpreted without a GPU."""

import gc
import importlib.util
import os
import re
import sys
import types
import unittest
from contextlib import suppress
from unittest import mock

import pytest
import torch

# A graph that was compiled for another build of the operators must not stand in for this one's.
# Caches of what C++ code compiles to are fine: torch finds out only once what this CPU has.
for cache in ("INDUCTOR_FX_GRAPH_CACHE", "INDUCTOR_AUTOGRAD_CACHE"):
    os.environ[f"TORCH{cache}"] = "0"
os.environ["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO"] = "0"
# Inductor's pool of compiling processes imports torch in each of them, beside the tests' processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

collect_ignore = ["tools/toy_family"]  # test_toy_family.py copies it into a tree
if not torch.cuda.is_available():
    collect_ignore_glob = ["*/test_cuda.py", "*/test_offload_cuda.py"]

FIRST = ("tests/tools/", "tests/package/", "tests/profiling/", "tests/contract/")

QUICK = re.compile(r"^(pytestmark = |@)pytest\.mark\.quick", re.M)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# torch.manual_seed queues a call for each kind of device that might come, and prints the stack for
# each: half a millisecond, which many tests pay thirty times.
for device_type in (torch.cuda, torch.xpu, torch.mtia):
    if not device_type.is_available():
        device_type.manual_seed_all = lambda seed: None


if importlib.util.find_spec("expecttest") is None:
    # torch.library.opcheck imports torch's test utilities, which derive a class from this one.
    names = {"TestCase": unittest.TestCase, "ACCEPT": False}
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    vars(sys.modules["expecttest"]).update(names)


if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError, AttributeError):  # no triton, or another interpreter
        import quick_interpreter

        quick_interpreter.install()


def pytest_ignore_collect(collection_path, config):
    """`-m quick` imports only files with quick tests: others need packages that may be missing."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return QUICK.search(collection_path.read_text()) is None or None
    return None


def pytest_collection_modifyitems(items):
    """The longest tests, which compile or run whole programs, come first.

    Then no process of pytest-xdist is left with one of them when the others are done, and the tests
    of a file run in one process, which makes the file's fixtures once.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.fixture(autouse=True)
def seeded():
    """Max norms over few elements are a matter of luck: the draw is the same at each run."""
    torch.manual_seed(0)


def pytest_unconfigure():
    """Ends `quick_collections`: Python, and Triton's bindings, free everything when they end."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Hides imported modules from the garbage collector, which would walk them for a second.

    transformers' Trainer collects after each training, and so do many tests.
    """
    gc.unfreeze()  # what earlier modules froze may be garbage by now
    for _ in range(2):  # finalizers let go of more
        gc.collect()
    gc.freeze()


@pytest.fixture
def sums():
    """Counts the fused sums of patched layers."""
    from fusedops.patching.lines.residual import site as residual

    run = residual._fused_sum
    with mock.patch.object(residual, "_fused_sum", side_effect=run) as counted:
        yield counted


@pytest.fixture
def any_size():
    """Tiny models run what large ones do."""
    from fusedops import fuse_always

    with fuse_always():
        yield


@pytest.fixture(params=[False, True], ids=["float32 products", "bfloat16 products"])
def products(request):
    """Whether CPUs multiply bfloat16 as such; by itself (None) that is the faster of both."""
    from fusedops import _C

    _C.bfloat16_products(request.param)
    yield request.param
    _C.bfloat16_products(None)


@pytest.fixture
def recorded(monkeypatch):
    """Returns a function that lists what `of` makes of each call of `home.name`, which still runs.

    into: the list, if it has the calls of several functions.
    """

    def record(home, name, of=lambda *args, **kwargs: kwargs, into=None):
        records, run = [] if into is None else into, getattr(home, name)

        def counted(*args, **kwargs):
            records.append(of(*args, **kwargs))
            return run(*args, **kwargs)

        monkeypatch.setattr(home, name, counted)
        return records

    return record


@pytest.fixture
def norms(monkeypatch):
    """The names of the fused norm functions, in the order of their calls."""
    from fusedops.functional import norm as family

    names, compiled = [], family._C

    class Recorder:
        def __getattr__(self, name):
            names.append(name)
            return getattr(compiled, name)

    monkeypatch.setattr(family, "_C", Recorder())
    return names


@pytest.fixture
def calls(recorded):
    """The keyword arguments of the calls of `attention` by patched models."""
    from fusedops.patching.models.attention import interface

    return recorded(interface, "attention")
