"""The package works without its compiled library, and says why it is missing.

The checks of what runs are in uncompiled_checks.py, in a process that has no compiled part.
"""

import json
import os
import re
import shutil
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch
from children import TESTS, forked, uncompiled_checks

from fusedops import extension
from fusedops.toolchain import library_name

ROOT = Path(__file__).parents[2]
CHECKS = ROOT / "tests" / "children" / "uncompiled_checks.py"
MINOR = ".".join(torch.__version__.split(".")[:2])
NAME = library_name(torch.__version__)
RECORD = {"torch": torch.__version__, "cuda": None, "simt": False}

# Says where the compiled part comes from, or why there is none, and runs one operator.
USE = """
import torch, fusedops
from fusedops import extension, functional
print("module", extension._C.__file__)
print("reason", extension.UNCOMPILED)
functional.layer_norm(torch.ones(2, 8), (8,))
"""


def python(*args, cwd=ROOT, **environment):
    """Runs a new interpreter; returns its exit status, stdout and stderr."""
    environment = {"FUSEDOPS_COMPILED": "", "FUSEDOPS_REQUIRE": ""} | environment
    return forked(*args, cwd=cwd, env=os.environ | environment).result()


@pytest.fixture
def package(tmp_path):
    """Copies the package without its compiled part to tmp_path, where imports find it."""
    skipped = shutil.ignore_patterns("*.so", "_*.json", "__pycache__", "csrc")
    return shutil.copytree(ROOT / "fusedops", tmp_path / "fusedops", ignore=skipped)


def use(package, **environment):
    environment = {"FUSEDOPS_CACHE": str(package.parent / "cache")} | environment
    return python("-c", USE, cwd=package.parent, **environment)


def reason(run):
    assert run.returncode == 0, run.stderr
    return next(line for line in run.stdout.splitlines() if line.startswith("reason"))[7:]


def put(folder, record=None, **changes):
    """Copies this process's compiled part to a folder, named as a build names it."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / NAME
    library.symlink_to(extension._C.__file__)
    library.with_suffix(".json").write_text(record or json.dumps(RECORD | changes))
    return library


def test_all_checks_pass_without_a_compiled_part():
    run = python("-m", "pytest", "-q", "-x", CHECKS, FUSEDOPS_COMPILED="0")
    assert run.returncode == 0, run.stdout + run.stderr


def test_functions_are_the_compiled_ones(tmp_path):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    run = python(CHECKS, tmp_path / "found.pt", FUSEDOPS_COMPILED="0", PYTHONPATH=path)
    assert run.returncode == 0, run.stderr
    found = torch.load(tmp_path / "found.pt")
    compiled = uncompiled_checks.results(), uncompiled_checks.without_gradients()
    torch.testing.assert_close(found, compiled)


def test_a_library_in_the_package_is_used(package):
    library = put(package)
    run = use(package, FUSEDOPS_REQUIRE="compiled")
    assert f"module {library}" in run.stdout and reason(run) == "" and not run.stderr


def test_a_library_in_the_cache_is_used(package):
    code = "from fusedops.cache import installed_cache_folder; print(installed_cache_folder())"
    cache = str(package.parent / "cache")
    found = python("-c", code, cwd=package.parent, FUSEDOPS_CACHE=cache)
    library = put(Path(found.stdout.strip()))
    assert library.is_relative_to(cache)
    run = use(package, FUSEDOPS_REQUIRE="compiled")
    assert f"module {library}" in run.stdout, run.stderr


def test_patch_releases_and_local_versions_of_torch_are_the_same(package):
    put(package, torch=f"{MINOR}.99+other")
    assert reason(use(package)) == ""


@pytest.mark.parametrize(
    "changes,wanted",
    [
        ({"torch": "2.99.0"}, f"compiled for torch 2.99, but this is torch {MINOR}"),
        ({"record": "{"}, "its record .* cannot be read"),
        ({"record": "{}"}, "its record .* cannot be read"),
    ],
    ids=["torch", "cut off", "empty"],
)
def test_a_library_that_does_not_fit_is_not_loaded(package, changes, wanted):
    put(package, **changes)
    run = use(package)
    assert re.match(wanted, reason(run))
    assert run.stderr.count("UserWarning") == 1


def test_a_record_is_asked_for(package):
    put(package).with_suffix(".json").unlink()
    assert "cannot be read" in reason(use(package))


def test_a_broken_library_gives_the_loaders_error(package):
    put(package).unlink()
    (package / NAME).write_bytes(b"no library")
    run = use(package)
    assert NAME in reason(run) and "fusedops build" in run.stderr


def test_libraries_for_others_are_named(package):
    (package / f"_C_torch2_98{EXTENSION_SUFFIXES[0]}").touch()
    (package / f"_C_torch2_101{EXTENSION_SUFFIXES[0]}").touch()
    assert reason(use(package)) == f"compiled for torch 2.98, 2.101, but this is torch {MINOR}"
    for path in package.glob("*.so"):
        path.unlink()
    (package / "_C_torch2_98.cpython-399-x86_64-linux-gnu.so").touch()
    (package / "_C.cpython-311-x86_64-linux-gnu.so").touch()  # an older version of the package's
    python_minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert reason(use(package)) == f"not compiled for Python {python_minor}"
    (package / "_C_torch2_98.cpython-399-x86_64-linux-gnu.so").unlink()
    assert reason(use(package)) == "not compiled on this machine"


def test_nothing_compiled_warns_once_at_the_first_use(package):
    run = use(package)
    assert reason(run) == "not compiled on this machine"
    (warning,) = [line for line in run.stderr.splitlines() if "Warning" in line]
    assert warning.startswith("<string>:6: UserWarning: fusedops has no compiled part")
    assert warning.endswith("Compile it: fusedops build")


WARNED = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, fusedops
    assert not caught, caught[0].message
    fusedops.env_report()
    assert not caught, caught[0].message
    {use}
    assert len(caught) == 1, [str(w.message) for w in caught]
    x = torch.ones(2, 8)
    fusedops.functional.rms_norm(x, (8,)), fusedops.functional.swiglu(x)
    assert len(caught) == 1, [str(w.message) for w in caught]
"""
USES = {
    "function": "fusedops.functional.swiglu(torch.ones(2, 8))",
    "graph": (
        "torch.compile(fusedops.functional.swiglu, backend='aot_eager', fullgraph=True)"
        "(torch.ones(2, 8))"
    ),
    "patch": "fusedops.patch(torch.nn.Sequential(torch.nn.LayerNorm(4)))",
    "optimizer": (
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = p.detach().clone();"
        "fusedops.optim.AdamW([p]).step()"
    ),
    "clipping": (
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = p.detach().clone();"
        "fusedops.clip_grad_norm_([p], 1.0)"
    ),
}


@pytest.mark.parametrize("name", USES)
def test_every_use_warns_once(name):
    run = python("-c", WARNED.format(use=USES[name]), FUSEDOPS_COMPILED="0")
    assert run.returncode == 0, run.stderr


def test_a_compiled_part_does_not_warn():
    run = python("-c", "import warnings\nwarnings.simplefilter('error', UserWarning)\n" + USE)
    assert run.returncode == 0, run.stderr


def test_required(package):
    run = use(package, FUSEDOPS_REQUIRE="compiled")
    assert run.returncode == 1
    error = run.stderr.splitlines()[-1]
    assert error.startswith("ImportError: FUSEDOPS_REQUIRE=compiled, but fusedops has no compiled")
    assert "not compiled on this machine" in error and "fusedops build" in error
    run = python("-c", USE, FUSEDOPS_COMPILED="0", FUSEDOPS_REQUIRE="compiled")
    assert run.returncode == 1 and "FUSEDOPS_COMPILED=0 hides" in run.stderr
    assert run.stderr.rstrip().endswith("Load it: unset FUSEDOPS_COMPILED")


@pytest.mark.parametrize("name", ["FUSEDOPS_REQUIRE", "FUSEDOPS_COMPILED"])
def test_other_values_are_refused(name):
    run = python("-c", USE, **{name: "yes"})
    assert run.returncode == 1
    assert f"ValueError: {name} must be " in run.stderr and "got 'yes'" in run.stderr


# Every function of torch.cuda raises: a call would initialise CUDA or fix CUDA_VISIBLE_DEVICES.
NO_CUDA = """
import types, torch

def refusal(name):
    def refuse(*args, **kwargs):
        raise AssertionError(f"torch.cuda.{name} was called")
    return refuse

for name, value in list(vars(torch.cuda).items()):
    if isinstance(value, types.FunctionType) and value.__module__.startswith("torch.cuda"):
        setattr(torch.cuda, name, refusal(name))
torch._C._cuda_getDeviceCount = refusal("_cuda_getDeviceCount")
import fusedops
"""


@pytest.mark.parametrize("compiled", ["1", "0"])
def test_import_does_not_touch_cuda(compiled):
    run = python("-c", NO_CUDA, FUSEDOPS_COMPILED=compiled, TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
