"""Packages build without torch, as in pip's isolated environments."""

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
sys.modules["torch"] = None
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources: building leaves files in it."""
    folder = tmp_path_factory.mktemp("tree")
    for name in FILES:
        shutil.copy2(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "_C_torch*")
    for name in ("csrc", "fusedops"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def made(tree, hook, into, **environment):
    command = [sys.executable, "-c", HOOK, hook, str(into)]
    env = {"PATH": "/usr/bin:/bin", **environment}
    run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return into / run.stdout.splitlines()[-1]


def test_an_sdist_has_metadata_and_sources(tree, tmp_path):
    with tarfile.open(made(tree, "build_sdist", tmp_path)) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        metadata = archive.extractfile(f"{archive.getnames()[0].partition('/')[0]}/PKG-INFO")
        said = metadata.read().decode()
    assert "Requires-Dist: torch>=2.11" in said and f"Version: {fusedops.__version__}" in said
    assert {"csrc/python/python.cpp", "csrc/cpu/isa/vec.h", "fusedops/building.py"} <= {*names}


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


def test_required_kernels_fail_the_build_and_say_why(tree, tmp_path):
    with pytest.raises(AssertionError, match="FUSEDOPS_REQUIRE=compiled: torch is not installed"):
        made(tree, "build_wheel", tmp_path, FUSEDOPS_REQUIRE="compiled")
