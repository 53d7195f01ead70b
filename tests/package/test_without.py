"""The package works without numpy, triton or transformers; a missing torch raises a clear error."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = "numpy,triton,matplotlib,rich,tqdm,transformers"


def without(packages, *command):
    """Runs a module in an interpreter without these packages; returns its output."""
    words = [sys.executable, "tests/children/without.py", packages, *command]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_they_cannot_be_imported_or_found():
    code = "from importlib.util import find_spec\nassert not find_spec('triton')\nimport numpy"
    with pytest.raises(AssertionError, match="No module named 'numpy'"):
        without("numpy,triton", "timeit", "-n", "1", "-r", "1", code)


def test_everything_runs_on_a_cpu():
    """The quick tests: each family, an optimizer with its checkpoint, a patched torch model."""
    printed = without(HIDDEN, "pytest", "-q", "-m", "quick", "-rs", "tests/package/test_quick.py")
    summary = re.search(r"(\d+) passed, 1 skipped", printed)
    assert summary and int(summary[1]) > 40, printed
    assert "transformers is not installed" in printed


def test_torch_is_missing():
    words = [sys.executable, "tests/children/without.py", "torch", "fusedops", "info"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode
    assert run.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: fusedops needs torch 2.11 or newer, which is not installed: "
        "pip install 'torch>=2.11'"
    )


def test_info():
    printed = without(HIDDEN, "fusedops", "info")
    for package in ("triton", "numpy", "transformers"):
        assert re.search(rf"^{package} +not installed$", printed, re.M)
