"""Tests of `fusedops doctor` with the files and settings of simulated machines."""

import os
import re

import pytest

from fusedops import __main__ as command_line
from fusedops import building, doctor, machine, toolchain
from fusedops.cache import caches
from fusedops.doctor import OK, PROBLEM, WARNING, Finding

GPP = "g++ (Debian 12.2.0-14) 12.2.0"
NVCC = """\
nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:58:59_PM_PDT_2025
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.36424714_0
"""
ZEN5 = "avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni"
SKYLAKE = "avx2 fma f16c avx512f avx512dq avx512bw avx512vl"
HASWELL = "avx2 fma f16c"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a program that prints a text, in the first folder of PATH."""

    def make(name, printed, status=0):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{printed}\nEOF\nexit {status}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
        return {"PATH": f"{folder}:/bin"}

    return make


@pytest.mark.parametrize(
    ("printed", "status", "level", "words"),
    [
        ("12.2.0", 0, OK, "g++ 12.2.0 compiles C++20"),
        ("9.4.0", 0, PROBLEM, "g++ 9.4.0 cannot compile the C++20"),
        ("", 1, PROBLEM, "does not print a version"),
    ],
)
def test_compiler(program, printed, status, level, words):
    environment = program("g++", printed, status)
    finding = doctor.compiler(environment, needed=True)
    assert finding.level == level and words in finding.text
    assert bool(finding.fix) == (level != OK)


def test_a_missing_compiler_is_a_problem_while_nothing_is_compiled(tmp_path):
    environment = {"PATH": str(tmp_path), "CXX": "clang++-19 -fcolor-diagnostics"}
    finding = doctor.compiler(environment, needed=True)
    assert finding.level == PROBLEM and "clang++-19 is not on PATH" in finding.text
    assert "install g++" in finding.fix
    assert doctor.compiler(environment, needed=False).level == WARNING


def test_a_compiler_that_is_no_command(program):
    environment = program("g++", "12.2.0")
    assert doctor.compiler(environment | {"CXX": " "}, needed=True).level == OK
    finding = doctor.compiler(environment | {"CXX": '"'}, needed=True)
    assert finding.level == PROBLEM and "CXX must be a command" in finding.text and finding.fix


def test_headers_ninja_and_torch(tmp_path):
    header = tmp_path / "Python.h"
    missing = doctor.python_header(header, needed=True), doctor.ninja([], needed=True)
    assert [finding.level for finding in missing] == [PROBLEM, PROBLEM]
    assert re.fullmatch(r"apt-get install python3\.\d+-dev", missing[0].fix)
    assert missing[1].fix == "pip install ninja"
    header.touch()
    assert doctor.python_header(header, needed=True).level == OK
    assert doctor.ninja(["ninja"], needed=True).level == OK
    levels = [doctor.torch_version(v).level for v in ("2.10.1+cpu", "2.11.0", "3.0.0a0+git1")]
    assert levels == [PROBLEM, OK, OK]


@pytest.mark.parametrize(
    ("reason", "record", "level", "words"),
    [
        ("", {"torch": "2.13.0+cpu"}, OK, "compiled for torch 2.13.0+cpu"),
        ("", {"torch": "2.13.1"}, OK, "compiled for torch 2.13.1"),
        ("", {"torch": "2.12.1"}, PROBLEM, "for torch 2.12.1, and torch 2.13.0+cpu is installed"),
        ("", {}, PROBLEM, "an unknown version"),
        ("there is none for torch 2.13", {}, PROBLEM, "as plain PyTorch: there is none for"),
    ],
)
def test_compiled_part(reason, record, level, words):
    finding = doctor.compiled_part(reason, record, "2.13.0+cpu")
    assert finding.level == level and words in finding.text
    assert finding.fix == ("" if level == OK else "fusedops build")


def test_a_hidden_compiled_part_is_not_compiled_again():
    hidden = "FUSEDOPS_COMPILED=0 hides it", {}, "2.13.0", "Load it: unset FUSEDOPS_COMPILED"
    assert doctor.compiled_part(*hidden).fix == "unset FUSEDOPS_COMPILED"
    elsewhere = "kernels need Linux on x86-64", {}, "2.13.0", ""
    assert doctor.compiled_part(*elsewhere).level == WARNING
    assert doctor.compiled_part(*elsewhere).fix == ""


@pytest.mark.parametrize(
    ("flags", "chosen", "level", "words"),
    [
        (ZEN5, "", OK, "AVX-512 with bfloat16 instructions."),
        (ZEN5, "avx512_bf16", OK, "AVX-512 with bfloat16 instructions."),
        (ZEN5, "avx2", WARNING, "but FUSEDOPS_CPU_ISA=avx2 chooses"),
        (SKYLAKE, "", OK, "AVX-512 without bfloat16"),
        (f"{SKYLAKE} avx512_bf16", "", OK, "AVX-512 without bfloat16"),
        (HASWELL, "", OK, "AVX2 but not AVX-512"),
        ("sse4_2 avx", "", PROBLEM, "no AVX2"),
    ],
)
def test_instruction_set(flags, chosen, level, words):
    cpuinfo = f"processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu {flags} lm\nbugs\t\t: none\n"
    finding = doctor.instruction_set(cpuinfo, {"FUSEDOPS_CPU_ISA": chosen} if chosen else {})
    assert finding.level == level and words in finding.text


def test_another_architecture_is_no_problem():
    cpuinfo = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes\nCPU implementer\t: 0x41\n"
    assert doctor.instruction_set(cpuinfo, {}).level == WARNING


@pytest.mark.parametrize(
    ("number", "allowed", "quota", "fix"),
    [
        (8, 8, None, ""),
        (1, 8, None, ""),
        (8, 4, None, "export OMP_NUM_THREADS=4"),
        (8, 64, 2.0, "export OMP_NUM_THREADS=2"),
        (2, 64, 1.5, "export OMP_NUM_THREADS=1"),
        (1, 64, 0.5, ""),
        (4, 2, 16.0, "export OMP_NUM_THREADS=2"),
    ],
)
def test_threads(number, allowed, quota, fix):
    finding = doctor.threads(number, allowed, quota)
    assert finding.fix == fix and finding.level == (PROBLEM if fix else OK)


def written(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "12:memory:/docker/0a\n4:cpu,cpuacct:/docker/0a\n1:name=systemd:/docker/0a\n"
V2 = "0::/user.slice/job.scope\n"
GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": V2, f"{GROUP}/user.slice/job.scope/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": V2, f"{GROUP}/user.slice/job.scope/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": V2, f"{GROUP}/user.slice/cpu.max": "400000 100000\n"}, 4.0),
        ({"proc/self/cgroup": "0::/\n", f"{GROUP}/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": V2,
                f"{GROUP}/user.slice/cpu.max": "200000 100000\n",
                f"{GROUP}/user.slice/job.scope/cpu.max": "800000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{GROUP}/cpu,cpuacct/docker/0a/cpu.cfs_quota_us": "300000\n",
                f"{GROUP}/cpu,cpuacct/docker/0a/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{GROUP}/cpu/cpu.cfs_quota_us": "200000\n",
                f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{GROUP}/cpu/cpu.cfs_quota_us": "-1\n",
                f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/other\n4:cpu:/\n",
                f"{GROUP}/cpu/other/cpu.cfs_quota_us": "200000\n",
                f"{GROUP}/cpu/other/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_cpu_quota(tmp_path, files, quota):
    assert machine.cpu_quota(written(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "number"),
    [
        ({}, 8),
        ({f"{GROUP}/user.slice/job.scope/cpu.max": "350000 100000"}, 3),
        ({f"{GROUP}/user.slice/cpu.max": "50000 100000"}, 1),
        ({f"{GROUP}/user.slice/job.scope/memory.max": f"{4 * 2**30}\n"}, 2),
        ({f"{GROUP}/user.slice/job.scope/memory.max": "max\n"}, 8),
        ({f"{GROUP}/user.slice/memory.max": f"{2**29}\n"}, 1),
    ],
)
def test_as_many_compilers_as_the_cgroup_has_cpus_and_memory(tmp_path, monkeypatch, files, number):
    monkeypatch.setattr(machine, "cpus", lambda: 8)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**23}.__getitem__)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    root = written(tmp_path, {"proc/self/cgroup": V2, **files})
    assert machine.compilers(root) == number
    v1 = {"proc/self/cgroup": V1, f"{GROUP}/memory/docker/0a/memory.limit_in_bytes": f"{2**32}"}
    assert machine.memory_limit(written(tmp_path / "v1", v1)) == 2**32


@pytest.mark.parametrize(
    ("version", "folder", "limit", "used", "cached"),
    [
        (V2, "user.slice/job.scope", "memory.max", "memory.current", "inactive_file"),
        (V2, "user.slice", "memory.max", "memory.current", "inactive_file"),
        (V1, "memory/docker/0a", "memory.limit_in_bytes", "memory.usage_in_bytes",
         "total_inactive_file"),
    ],
)  # fmt: skip
def test_available_memory_is_the_machines_or_the_cgroups(
    tmp_path, version, folder, limit, used, cached
):
    files = {"proc/self/cgroup": version, "proc/meminfo": "MemFree: 1 kB\nMemAvailable: 1000 kB\n"}
    assert machine.available_memory(written(tmp_path / "machine", files)) == 1000 * 1024
    group = {limit: "900000\n", used: "500000\n", "memory.stat": f"anon 7\n{cached} 100000\n"}
    files |= {f"{GROUP}/{folder}/{name}": text for name, text in group.items()}
    assert machine.available_memory(written(tmp_path / "group", files)) == 500000


@pytest.mark.parametrize(
    ("environment", "cpus", "named"),
    [
        ({}, 8, []),
        ({"OMP_NUM_THREADS": "8", "OMP_PROC_BIND": "false"}, 8, []),
        ({"OMP_NUM_THREADS": "1"}, 3, []),
        ({"OMP_NUM_THREADS": "1"}, 4, ["OMP_NUM_"]),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, 8, ["OMP_NUM_", "MKL_NUM_"]),
        ({"OMP_DYNAMIC": "TRUE", "OMP_WAIT_POLICY": "active"}, 8, ["OMP_DYN", "OMP_WAIT_POLICY"]),
        ({"OMP_PROC_BIND": "close", "GOMP_CPU_AFFINITY": "0"}, 8, ["OMP_PROC_BIND", "GOMP_CPU"]),
        ({"OMP_THREAD_LIMIT": "1"}, 8, ["OMP_THREAD_LIMIT"]),
    ],
)
def test_openmp(environment, cpus, named):
    findings = list(doctor.openmp(environment, cpus))
    if not named:
        assert [finding.level for finding in findings] == [OK]
    else:
        assert all(finding.level == WARNING for finding in findings)
        for finding, name in zip(findings, named, strict=True):
            assert name in finding.text and finding.fix.startswith(f"unset {name}")


@pytest.mark.parametrize(
    ("torchs", "toolkit", "devices", "level", "words"),
    [
        (None, None, 0, OK, "built without CUDA"),
        (None, "13.0", 0, OK, "built without CUDA"),
        ("13.0", "13.0", 0, OK, "nvcc 13.0 can compile for torch's CUDA 13.0; 0 GPUs"),
        ("13.0", "13.1", 1, OK, "1 GPU."),
        ("13.0", None, 0, OK, "nvcc is missing"),
        ("13.0", None, 1, WARNING, "nvcc is missing"),
        (
            "13.0",
            "12.8",
            1,
            PROBLEM,
            "nvcc is from CUDA 12.8, which cannot compile for torch's CUDA 13.0",
        ),
        (
            "13.0",
            "12.8",
            0,
            WARNING,
            "nvcc is from CUDA 12.8, which cannot compile for torch's CUDA 13.0",
        ),
    ],
)
def test_cuda(torchs, toolkit, devices, level, words):
    finding = doctor.cuda(torchs, toolkit, devices)
    assert finding.level == level and words in finding.text
    assert bool(finding.fix) == (level != OK)


def test_a_build_without_gpu_kernels_beside_a_gpu_and_nvcc():
    finding = doctor.cuda("13.0", "13.0", 1, compiled=False)
    assert (finding.level, finding.fix) == (PROBLEM, "fusedops build")
    assert finding.text.startswith("There is 1 GPU and nvcc 13.0, but the compiled part has no GPU")
    assert doctor.cuda("13.0", "13.0", 0, compiled=False).level == OK
    assert doctor.cuda("13.0", None, 1, compiled=False).level == WARNING


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("version", "capabilities", "level", "words"),
    [
        (91900, [AMPERE, HOPPER], OK, "tries cuDNN 9.19.0 first"),
        (91501, [(10, 0)], OK, "tries cuDNN 9.15.1 first"),
        (91500, [HOPPER], WARNING, "torch finds cuDNN 9.15.0, so its attention does not use it"),
        (None, [HOPPER], WARNING, "torch finds no cuDNN"),
    ],
)
def test_cudnn(version, capabilities, level, words):
    (finding,) = doctor.cudnn(version, capabilities, {})
    assert finding.level == level and words in finding.text
    assert ("LD_LIBRARY_PATH" in finding.fix) == (level != OK)


def test_cudnn_that_nobody_wants():
    """torch does not prefer it on other GPUs, or if the user says so."""
    assert not [*doctor.cudnn(91000, [AMPERE, (12, 0)], {})]
    (finding,) = doctor.cudnn(91900, [HOPPER], {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"})
    assert (finding.level, finding.fix) == (WARNING, "unset TORCH_CUDNN_SDPA_DEPRIORITIZED")
    (finding,) = doctor.cudnn(91900, [HOPPER], {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"})
    assert finding.level == OK


def headers(home):
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime.h").touch()


def test_nvcc_that_runs_another_toolkits(program, tmp_path):
    """/usr/local/bin/nvcc may be a script; the headers are beside the nvcc that it runs."""
    real = tmp_path / "opt" / "cuda-13.0"
    environment = program("nvcc", "")
    (tmp_path / "bin" / "nvcc").write_text(f"#!/bin/sh\necho '#$ _HERE_={real}/bin' >&2\n")
    (real / "bin").mkdir(parents=True)
    (real / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (real / "bin" / "nvcc").chmod(0o755)
    (real / "lib64").mkdir()
    without = toolchain.toolkit(environment)
    assert without is None or without.nvcc.is_relative_to("/usr/local")
    assert toolchain.toolkit(environment | {"CUDA_HOME": str(tmp_path)}) is None
    headers(real)
    toolkit = toolchain.toolkit(environment)
    assert toolkit == toolchain.Toolkit(real / "bin" / "nvcc", real / "include", real / "lib64")


def test_headers_as_conda_has_them(tmp_path):
    target = tmp_path / "targets" / "x86_64-linux"
    headers(target)
    (target / "lib").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(0o755)
    toolkit = toolchain.toolkit({"CUDA_HOME": str(tmp_path)})
    assert toolkit.include == target / "include" and toolkit.libraries == target / "lib"


def test_nvcc_version(program, tmp_path):
    """Like torch: CUDA_HOME alone decides, and PATH comes before /usr/local/cuda."""
    environment = program("nvcc", NVCC)
    headers(tmp_path)
    assert toolchain.nvcc_version(environment) == "13.0"
    toolkit = toolchain.toolkit(environment)
    assert toolkit.nvcc == tmp_path / "bin" / "nvcc" and toolkit.include == tmp_path / "include"
    assert toolchain.toolkit(environment | {"CUDA_HOME": str(tmp_path / "other")}) is None
    for name in ("CUDA_HOME", "CUDA_PATH"):
        assert toolchain.nvcc_version({"PATH": "", name: str(tmp_path)}) == "13.0"
    (tmp_path / "bin" / "nvcc").unlink()  # a folder without nvcc
    assert toolchain.nvcc_version({"PATH": "", "CUDA_HOME": str(tmp_path)}) is None


def test_cache(tmp_path):
    assert doctor.cache(tmp_path / "cache" / "fusedops", needed=True).level == OK
    (tmp_path / "file").touch(0o755)
    for needed, level in ((True, PROBLEM), (False, WARNING)):
        finding = doctor.cache(tmp_path / "file" / "fusedops", needed)
        assert finding.level == level and "FUSEDOPS_CACHE" in finding.fix


def test_the_folder_of_caches(tmp_path):
    assert caches({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "fusedops"
    both = {"FUSEDOPS_CACHE": str(tmp_path / "own"), "XDG_CACHE_HOME": str(tmp_path)}
    assert caches(both) == tmp_path / "own"
    assert caches({}).name == "fusedops"


def test_every_check_is_printed(capsys):
    status = command_line.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert status == any(line.startswith(PROBLEM) for line in lines)
    titles = [line.split()[1] for line in lines if not line.startswith(" ")]
    checks = ["compiler", "headers", "ninja", "torch", "kernels", "CPU", "choices", "threads"]
    assert list(dict.fromkeys(titles)) == [*checks, "OpenMP", "CUDA", "cache"]


@pytest.mark.parametrize(("level", "status"), [(OK, 0), (WARNING, 0), (PROBLEM, 1)])
def test_exit_status(monkeypatch, capsys, level, status):
    findings = Finding(OK, "CPU", "Fine."), Finding(level, "threads", "Too many.", "export X=1")
    monkeypatch.setattr(doctor, "findings", lambda: iter(findings))
    assert command_line.main(["doctor"]) == status
    assert capsys.readouterr().out.endswith("Too many.\n" + 20 * " " + "fix: export X=1\n")


def test_an_unknown_subcommand_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as left:
        command_line.main(["docter"])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "docter" in error and "doctor" in error and "build" in error


def test_build_passes_on_the_number_of_jobs(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(building, "build_in_cache", lambda jobs: called.append(jobs) or "there")
    assert command_line.main(["build", "--jobs", "2"]) == command_line.main(["build"]) == 0
    assert called == [2, None] and capsys.readouterr().out == "compiled there\n" * 2


def test_a_build_that_cannot_be_says_why(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert command_line.main(["build"]) == 1
    error = capsys.readouterr().err
    assert "there is no C++ compiler: no-such-compiler is not on PATH" in error
