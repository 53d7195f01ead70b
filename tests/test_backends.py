"""Forcing a backend, the report of what runs, and the command line around them."""

import os
import subprocess
import sys

import pytest
import torch

import fusedops
from fusedops.backends import BACKENDS, FAMILIES, unavailable
from fusedops.functional import layer_norm


def run(*args, **env):
    """A Python process of its own: output and errors as one text, and whether it succeeded."""
    command = [sys.executable, *args]
    done = subprocess.run(
        command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout, done.returncode == 0


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match=r"backend must be one of cpu, .*, got 'gpu'"):
        fusedops.backend("gpu").__enter__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_backend_that_cannot_run_says_why():
    with pytest.raises(RuntimeError, match="backend 'cuda' cannot run: torch finds no CUDA device"):
        fusedops.backend("cuda").__enter__()
    code = "import fusedops; fusedops.backend('triton').__enter__()"
    said, succeeded = run("-c", code, TRITON_INTERPRET="0")
    assert not succeeded and "set TRITON_INTERPRET=1 to interpret" in said


def test_the_cuda_kernels_are_tested_somewhere():
    """On a GPU, or in the emulator that `make` builds where there is none."""
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
    assert all(reason in report for reason in reasons if reason)
    with fusedops.backend("reference"):
        assert "forced        reference" in fusedops.env_report()


def test_info_prints_the_report():
    said, succeeded = run("-m", "fusedops", "info", FUSEDOPS_BACKEND="reference")
    assert succeeded and "forced        reference" in said and "add_rms_norm" in said


def test_environment_forces_a_backend():
    code = (
        "import torch, fusedops; x = torch.ones(2, 8, requires_grad=True);"
        "print(type(fusedops.functional.layer_norm(x, (8,)).grad_fn).__name__)"
    )
    fused, _ = run("-c", code)
    reference, _ = run("-c", code, FUSEDOPS_BACKEND="reference")
    assert fused != reference
    said, succeeded = run("-c", code, FUSEDOPS_BACKEND="nonsense")
    assert not succeeded and "backend must be one of" in said
