"""The build chooses compilers, CUDA and GPU architectures, and names what a machine lacks."""

import os
import types
from pathlib import Path

import pytest
import torch
from children import forked

from fusedops import building, toolchain
from fusedops.toolchain import Torch


@pytest.fixture
def gpu_build(monkeypatch):
    """Returns a torch with CUDA 13.0 and an nvcc, whose release is the argument."""
    for name in ("FUSEDOPS_CUDA", "FUSEDOPS_SIMT"):
        monkeypatch.delenv(name, raising=False)

    def set_up(release):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(toolchain, "nvcc_version", lambda: release)

    return set_up


@pytest.mark.parametrize(
    ("release", "cuda", "words"),
    [
        ("13.2", "13.0", ""),
        ("12.8", None, "torch has CUDA 13.0, but nvcc is from CUDA 12.8"),
        (None, None, "torch has CUDA 13.0, but nvcc is missing"),
    ],
)
def test_without_a_fitting_nvcc_the_cpu_part_is_compiled(
    gpu_build, monkeypatch, capsys, release, cuda, words
):
    gpu_build(release)
    assert toolchain.cuda_to_compile_for() == cuda
    assert words in capsys.readouterr().out
    monkeypatch.setenv("FUSEDOPS_CUDA", "1")
    monkeypatch.setenv("FUSEDOPS_SIMT", "1")
    if cuda is None:
        with pytest.raises(RuntimeError, match=f"FUSEDOPS_CUDA=1 needs .*: {words}"):
            toolchain.cuda_to_compile_for()
    else:  # a build for GPUs has no emulated kernels
        assert (Torch.installed().cuda, Torch.installed().simt) == (cuda, False)
    monkeypatch.setenv("FUSEDOPS_CUDA", "0")
    assert toolchain.cuda_to_compile_for() is None


@pytest.mark.parametrize("devices", [0, 1])
def test_gpus_to_compile_for_where_none_is_visible(monkeypatch, devices):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: (9, 0))
    flags = " ".join(building._arch_flags())
    assert "code=sm_90" in flags and ("code=sm_80" in flags) == (devices == 0)
    assert "TORCH_CUDA_ARCH_LIST" not in os.environ
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert "code=sm_86" in " ".join(building._arch_flags())


def test_another_machine_is_named(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="aarch64"))
    words = "kernels need Linux on x86-64, but this is linux on aarch64"
    assert toolchain.unsupported() == toolchain.unbuildable() == words


ELSEWHERE = """
import os
other = os.uname_result([*os.uname()[:4], "aarch64"])
os.uname = lambda: other
import torch, fusedops
print(fusedops.env_report())
fusedops.functional.swiglu(torch.ones(2, 8))
"""


def test_a_machine_without_kernels_is_not_told_to_compile():
    environment = os.environ | {"FUSEDOPS_REQUIRE": "", "FUSEDOPS_COMPILED": ""}
    run = forked("-c", ELSEWHERE, env=environment).result()
    assert run.returncode == 0, run.stderr
    assert "kernels need Linux on x86-64, but this is linux on aarch64" in run.stdout
    assert "fusedops has no compiled part (kernels need Linux on x86-64" in run.stderr
    assert "fusedops build" not in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"CXX": "no-such-compiler -x"}, "no-such-compiler is not on PATH"),
        ({"CXX": "'"}, "CXX must be a command"),
        ({"FUSEDOPS_TORCHES": "no-such-folder"}, "must contain folders */torch"),
        ({"CXX": " "}, ""),
    ],
)
def test_what_keeps_a_build_from_starting(monkeypatch, changed, words):
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    reason = toolchain.unbuildable()
    assert words in reason and bool(reason) == bool(words)


def test_python_headers_are_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "python_header", lambda: tmp_path / "Python.h")
    assert "apt-get install python3." in toolchain.unbuildable()


def torch_package(folder, git):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version.py").write_text(f"__version__ = '2.13.0'\ngit_version = '{git}'\n")
    return Torch.unpacked(folder)


def test_another_torch_of_the_same_version_compiles_again(tmp_path):
    """ninja compares file times, and an older torch's files would not be newer."""
    torch_of, work = torch_package(tmp_path / "torch", "a"), tmp_path / "work"
    compiles = [step for step in building.steps([torch_of], work) if step.rule == "compile"]
    versions = {name for step in compiles for name in step.needs if name.endswith(".version")}
    headers = {step.made for step in compiles if step.made.endswith(".gch")}
    assert len(headers) == 4 and all(versions & {*s.needs} for s in compiles if s.made in headers)
    assert all({*step.needs} & (versions | headers) for step in compiles)
    before = {name: Path(name).stat().st_mtime_ns for name in versions}
    list(building.steps([torch_of], work))
    assert {name: Path(name).stat().st_mtime_ns for name in versions} == before
    list(building.steps([torch_package(tmp_path / "torch", "b")], work))
    assert all(Path(name).stat().st_mtime_ns > before[name] for name in versions)


def test_builds_in_one_folder_run_in_turn(tmp_path):
    """`make -j2` starts two; the second waits for the first."""
    ninja = tmp_path / "ninja.py"
    ninja.write_text(
        "import pathlib, sys, time\nwork = pathlib.Path(sys.argv[2])\n"
        "assert not (work / 'running').exists(), 'two at a time'\n"
        "(work / 'running').touch()\ntime.sleep(0.5)\n(work / 'running').unlink()\n"
        f"(work / '{toolchain.library_name('2.13.0')}').touch()\n"
    )
    code = (
        "import pathlib, sys\nfrom fusedops import building, toolchain\n"
        f"building.ninja = lambda: [sys.executable, {str(ninja)!r}]\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "building.build(folder / 'into', folder / 'work')\n"
    )
    torch_package(tmp_path / "torches" / "2.13" / "torch", "a")
    environment = os.environ | {"FUSEDOPS_TORCHES": str(tmp_path / "torches")}
    builds = [forked("-c", code, env=environment) for _ in range(2)]
    for build in builds:
        build.printed()


def test_a_torch_that_is_not_imported_is_compiled_for_gpus_if_asked(
    gpu_build, monkeypatch, tmp_path
):
    gpu_build("13.0")
    torch_package(tmp_path, "a")
    version = tmp_path / "version.py"
    version.write_text(version.read_text() + "cuda: Optional[str] = '13.0'\n")
    assert Torch.unpacked(tmp_path).cuda is None
    monkeypatch.setenv("FUSEDOPS_CUDA", "1")
    assert Torch.unpacked(tmp_path).cuda == "13.0"
    version.write_text(version.read_text().replace("'13.0'", "None"))
    with pytest.raises(RuntimeError, match=r"FUSEDOPS_CUDA=1: .*: torch is built without CUDA"):
        Torch.unpacked(tmp_path)
