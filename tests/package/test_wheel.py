"""Tests of the wheel: one library per torch, shared kernels, and symbols too new for manylinux."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from checks import wheel
from checks.packages import VERSIONS, download
from fusedops import building, toolchain

ROOT = Path(__file__).parents[2]
CIBUILDWHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]


def unpacked(folder, version):
    package = folder / version / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__version__ = '{version}+cu130'\n")
    return package


@pytest.fixture
def torches(tmp_path, monkeypatch):
    packages = [unpacked(tmp_path, version) for version in ("2.9.1", "2.11.0", "2.12.1")]
    monkeypatch.setenv("FUSEDOPS_TORCHES", str(tmp_path))
    return packages


def test_each_torch_gets_a_library_of_the_same_kernels(torches, tmp_path):
    requested = toolchain.requested_torches()
    assert [torch.folder for torch in requested] == torches  # the oldest first
    steps = [*building.steps(requested, tmp_path)]
    links = [step for step in steps if step.rule == "link"]
    assert [Path(step.made).name for step in links] == [
        toolchain.library_name(torch.version) for torch in requested
    ]
    inputs = [set(step.sources) for step in links]
    shared = set.intersection(*inputs)
    assert {Path(output).parent.name for output in shared} == {"kernels"}
    for torch, mine in zip(requested, inputs, strict=True):
        glue = {step.made: step for step in steps if step.made in mine - shared}
        assert {Path(output).parent.name for output in glue} == {f"glue_{torch.name}"}
        for step in glue.values():
            assert f"{torch.folder}/include" in step.flags
            assert not [
                other
                for other in torches
                if f"{other}/" in step.flags.replace(f"{torch.folder}/", "")
            ]
    assert len({step.made for step in steps}) == len(steps)


def test_a_folder_without_a_torch_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDOPS_TORCHES", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"FUSEDOPS_TORCHES: .* must contain folders \*/torch"):
        building.build(tmp_path, tmp_path)


def test_the_folder_of_packages_holds_the_supported_ones_alone(tmp_path):
    for version in (*VERSIONS, "2.10.0"):
        (unpacked(tmp_path, version).parent / "unpacked").touch()
    download(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*VERSIONS}


def compiled(code, path):
    command = ["g++", "-x", "c++", "-", "-shared", "-fPIC", "-o", str(path)]
    subprocess.run(command, input=code, text=True, check=True)
    return path


def test_symbols_newer_than_manylinux_2_28_are_listed(tmp_path):
    """thrd_create moved to GLIBC_2.34's libc; malloc is as old as x86-64."""
    new = compiled(
        '#include <threads.h>\n#include <stdlib.h>\nextern "C" void* f(thrd_t* t, thrd_start_t s)'
        " { thrd_create(t, s, nullptr); return malloc(8); }",
        tmp_path / "new.so",
    )
    assert [*wheel.blocking(new)] == ["thrd_create@GLIBC_2.34"]
    old = compiled(
        '#include <stdlib.h>\nextern "C" void* f() { return malloc(8); }', tmp_path / "old.so"
    )
    assert [*wheel.blocking(old)] == []


def test_cibuildwheel_builds_the_same_wheel():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = [c.rpartition("3.")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert CIBUILDWHEEL["build"] == [f"cp3{minor}-*" for minor in pythons]
    environment = CIBUILDWHEEL["environment"]
    assert CIBUILDWHEEL["before-build"].endswith(environment["FUSEDOPS_TORCHES"])
    assert environment["FUSEDOPS_REQUIRE"] == "compiled"
    repair = CIBUILDWHEEL["linux"]["repair-wheel-command"]
    assert re.findall(r"--exclude '(\S+)'", repair) == [*wheel.OUTSIDE]
