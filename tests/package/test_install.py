"""Source distributions and wheels build without torch; pip installs without a compiler."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fusedops

ROOT = Path(__file__).parents[2]
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
# What pip, build and uv call, in an interpreter where importing torch fails.
HOOK = """
import sys
if len(sys.argv) == 3:
    sys.modules["torch"] = None
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Returns a copy of the sources, because building leaves files."""
    folder = tmp_path_factory.mktemp("tree")
    for name in FILES:
        shutil.copy2(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "_C_torch*")
    for name in ("csrc", "examples", "fusedops"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def ran(tree, hook, into, *with_torch, **environment):
    command = [sys.executable, "-c", HOOK, hook, str(into), *with_torch]
    env = {"PATH": "/usr/bin:/bin", **environment}
    run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


def made(tree, hook, into, **environment):
    return into / ran(tree, hook, into, **environment).stdout.splitlines()[-1]


def test_an_sdist_has_metadata_and_sources(tree, tmp_path):
    with tarfile.open(made(tree, "build_sdist", tmp_path)) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        metadata = archive.extractfile(f"{archive.getnames()[0].partition('/')[0]}/PKG-INFO")
        message = metadata.read().decode()
    assert "Requires-Dist: torch>=2.11" in message and f"Version: {fusedops.__version__}" in message
    assert {"csrc/python/python.cpp", "csrc/cpu/isa/vec.h", "fusedops/building.py"} <= {*names}
    assert {"examples/plain_loop.py", "examples/patch_a_model.ipynb"} <= {*names}


def test_metadata_alone(tree, tmp_path):
    folder = made(tree, "prepare_metadata_for_build_wheel", tmp_path)
    assert "Requires-Dist: torch>=2.11" in (folder / "METADATA").read_text()


def test_a_wheel_without_a_torch_is_pure_and_can_be_compiled(tree, tmp_path):
    wheel = made(tree, "build_wheel", tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
    assert {"fusedops/csrc/python/python.cpp", "fusedops/building.py", "fusedops/py.typed"} <= names
    assert not [name for name in names if name.endswith(".so")]
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fusedops"}
    assert {"fusedops/demo/training.py", "fusedops/measuring/ratios.py"} <= names


def test_required_kernels_fail_the_build_and_say_why(tree, tmp_path):
    with pytest.raises(AssertionError, match=r"FUSEDOPS_REQUIRE=compiled: .* has no torch"):
        made(tree, "build_wheel", tmp_path, FUSEDOPS_REQUIRE="compiled")


def test_an_isolated_build_says_how_to_compile(tree, tmp_path):
    """It has no torch even if one is installed, so `pip install torch` would not help."""
    printed = ran(tree, "build_wheel", tmp_path).stdout
    assert "without its compiled part: this build environment has no torch" in printed
    assert "Run `fusedops build` after" in printed and "--no-build-isolation" in printed


def test_a_torch_that_cannot_be_imported_does_not_end_the_installation(tree, tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    run = ran(tree, "build_wheel", tmp_path, "torch", PYTHONPATH=str(broken.parent))
    words = "fusedops is installed without its compiled part: libcudart.so.13: cannot open"
    assert words in run.stdout
    with pytest.raises(AssertionError, match=r"FUSEDOPS_REQUIRE=compiled: libcudart.so.13"):
        asked = {"PYTHONPATH": str(broken.parent), "FUSEDOPS_REQUIRE": "compiled"}
        ran(tree, "build_wheel", tmp_path, "torch", **asked)


def test_what_an_earlier_build_left_is_not_packaged(tree, tmp_path):
    old = tree / "build" / "lib" / "fusedops"
    (old / "csrc").mkdir(parents=True, exist_ok=True)
    left = [old / "_C_torch2_9.so", old / "_C_torch2_9.json", old / "csrc" / "old.cpp"]
    for path in left:
        path.touch()
    with zipfile.ZipFile(made(tree, "build_wheel", tmp_path)) as archive:
        names = archive.namelist()
    assert not [n for n in names if n.endswith(("old.cpp", "_C_torch2_9.so", "_C_torch2_9.json"))]
    assert "fusedops/csrc/python/python.cpp" in names


USE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, fusedops
    x = torch.randn(3, 8)
    y = fusedops.functional.layer_norm(x, (8,))
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (8,)))
    fusedops.functional.swiglu(x)
(warning,) = [str(w.message) for w in caught if "fusedops" in str(w.message)]
print(fusedops.__file__)
print(warning)
"""


def test_pip_installs_without_a_compiler(tree, tmp_path):
    """Without g++ in PATH, the first use gives one warning and right results."""
    pytest.importorskip("pip")
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-index", "--no-deps", "--no-compile"]
    command = [*pip, "--no-build-isolation", "--target", str(tmp_path / "installed"), str(tree)]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "there is no C++ compiler: g++ is not on PATH" in run.stdout + run.stderr
    env["PYTHONPATH"] = str(tmp_path / "installed")
    command = [sys.executable, "-c", USE]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    file, warning = run.stdout.splitlines()
    assert file.startswith(str(tmp_path / "installed"))
    assert "not compiled on this machine" in warning and warning.endswith("fusedops build")
