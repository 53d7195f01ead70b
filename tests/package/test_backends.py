"""Tests of forcing a backend, also in several threads, and of the report of `fusedops info`."""

import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from children import forked

import fusedops
from fusedops import backends
from fusedops.backends import BACKENDS, FAMILIES, unavailable
from fusedops.functional import layer_norm


def run(*args, **env):
    """Runs a Python process; returns its output and errors, and whether it succeeded."""
    done = forked(*args, env=os.environ | env).result()
    return done.stdout + done.stderr, done.returncode == 0


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match=r"backend must be one of cpu, .*, got 'gpu'"):
        fusedops.backend("gpu").__enter__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_backend_that_cannot_run_says_why():
    with pytest.raises(RuntimeError, match="backend 'cuda' cannot run: torch finds no CUDA device"):
        fusedops.backend("cuda").__enter__()
    code = "import fusedops; fusedops.backend('triton').__enter__()"
    message, succeeded = run("-c", code, TRITON_INTERPRET="0")
    assert not succeeded and "set TRITON_INTERPRET=1 to run the interpreter" in message


def test_the_cuda_kernels_are_tested_somewhere():
    """On a GPU, or in the emulator, which `make` builds on other machines."""
    cuda, simt = (unavailable("layer_norm", name) for name in ("cuda", "simt"))
    assert cuda is None or simt is None, (cuda, simt)


def test_the_reference_runs_and_the_default_comes_back():
    x = torch.randn(3, 8, requires_grad=True)
    default = type(layer_norm(x, (8,)).grad_fn).__name__
    with fusedops.backend("reference"):
        assert type(layer_norm(x, (8,)).grad_fn).__name__ != default
        with fusedops.backend("cpu"):
            assert type(layer_norm(x, (8,)).grad_fn).__name__ == default
        assert type(layer_norm(x, (8,)).grad_fn).__name__ != default
    assert type(layer_norm(x, (8,)).grad_fn).__name__ == default


def test_an_error_inside_gives_the_default_back():
    x = torch.randn(3, 8, requires_grad=True)
    default = type(layer_norm(x, (8,)).grad_fn).__name__
    with pytest.raises(KeyError), fusedops.backend("reference"):
        raise KeyError
    assert type(layer_norm(x, (8,)).grad_fn).__name__ == default


def test_report_names_every_operator_and_what_is_forced():
    report = fusedops.env_report()
    assert all(op in report for ops in FAMILIES.values() for op in ops)
    assert torch.__version__ in report and "forced        nothing" in report
    reasons = [unavailable("layer_norm", name) for name in BACKENDS]
    assert all(report.count(reason) <= 2 and reason in report for reason in reasons if reason)
    with fusedops.backend("reference"):
        assert "forced        reference" in fusedops.env_report()


def test_info_prints_the_report():
    message, succeeded = run("-m", "fusedops", "info", FUSEDOPS_BACKEND="reference")
    assert succeeded and "forced        reference" in message and "add_rms_norm" in message


def test_environment_forces_a_backend():
    code = (
        "import torch, fusedops; x = torch.ones(2, 8, requires_grad=True);"
        "print(type(fusedops.functional.layer_norm(x, (8,)).grad_fn).__name__)"
    )
    fused, _ = run("-c", code)
    reference, _ = run("-c", code, FUSEDOPS_BACKEND="reference")
    assert fused != reference
    message, succeeded = run("-c", code, FUSEDOPS_BACKEND="nonsense")
    assert not succeeded and "backend must be one of" in message


def kernel():
    """Returns the kernel that layer_norm runs on a CPU."""
    x = torch.ones(3, 8, requires_grad=True)
    return type(layer_norm(x, (8,)).grad_fn).__name__


def is_default():
    with fusedops.backend("reference"):
        forced = kernel()
    return backends.forced() is None and kernel() == DEFAULT != forced


DEFAULT = kernel()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_blocks_may_end_in_any_order(order):
    """Blocks of several threads may; two of these force the same backend."""
    names = ["reference", "cpu", "reference"]
    blocks = {at: fusedops.backend(name) for at, name in enumerate(names)}
    for block in blocks.values():
        block.__enter__()
    for at in order:
        innermost = names[max(blocks)]
        assert backends.forced() == innermost
        assert (kernel() == DEFAULT) == (innermost == "cpu")
        blocks.pop(at).__exit__(None, None, None)
    assert is_default()


@pytest.mark.parametrize("last", ["first", "second"])
def test_two_threads_that_overlap(last):
    """The first enters, then the second, and either may leave first."""
    entered, may_leave = threading.Event(), threading.Event()
    seen = []

    def hold():
        with fusedops.backend("reference"):
            entered.set()
            may_leave.wait(60)
            seen.append(backends.forced())

    other = threading.Thread(target=hold)
    with fusedops.backend("cpu"):
        other.start()
        entered.wait(60)
        assert backends.forced() == "reference" and kernel() != DEFAULT
        if last == "first":
            may_leave.set()
            other.join()
            assert backends.forced() == "cpu" and kernel() == DEFAULT
    may_leave.set()
    other.join()
    assert seen == ["reference"] and is_default()


def test_threads_that_enter_and_leave_at_once():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def enter(names):
        for name in names:
            with fusedops.backend(name):
                time.sleep(0)

    turns = [("reference", "cpu") * 20, ("cpu", "reference") * 20, ("reference",) * 40]
    with ThreadPoolExecutor(len(turns)) as threads:
        list(threads.map(enter, turns))
    sys.setswitchinterval(interval)
    assert is_default()


ABANDONED = {
    "entered": "block = fusedops.backend('reference'); block.__enter__()",
    "two": "blocks = [fusedops.backend(n) for n in ('cpu', 'reference')]; [*map(enter, blocks)]",
    "module held": "torch.held = fusedops.backends; enter(block := fusedops.backend('cpu'))",
    "suspended": "generator = suspended(); next(generator)",
}


@pytest.mark.parametrize("lines", ABANDONED.values(), ids=ABANDONED)
def test_a_block_that_is_never_left_ends_with_the_process(lines):
    """Modules' globals may already be None then."""
    code = f"""
import torch, fusedops

def enter(block):
    block.__enter__()

def suspended():
    with fusedops.backend("reference"):
        yield

{lines}
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_backend_that_fails_on_the_way_is_not_forced(monkeypatch):
    def fail(library, family, name):
        if (family, name) == ("linear", failing):
            raise OSError("no memory")
        return force(library, family, name)

    force = backends._force
    monkeypatch.setattr(backends, "_force", fail)
    failing = "reference"
    with pytest.raises(OSError, match="no memory"), fusedops.backend("reference"):
        pass
    assert kernel() == DEFAULT
    failing = "cpu"
    with fusedops.backend("reference"):
        with pytest.raises(OSError, match="no memory"), fusedops.backend("cpu"):
            pass
        assert backends.forced() == "reference" and kernel() != DEFAULT
    assert is_default()
