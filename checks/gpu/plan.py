"""The steps of `make gpu-once` and `make gpu-rest`, in the order of their importance."""

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from checks.gpu.runner import ROOT, Run, Step

# A command on a GPU machine may take 10 minutes. What the steps of `gpu-once` leave of this is for
# archives and the start.
CALL_S = 540.0
BUILD_S, SMOKE_S, TESTS_S, ROWS_S, COUNTERS_S, SANITIZER_S = 150, 90, 110, 100, 35, 40
TRAIN_S, PROFILE_S = 150, 100
MEMCHECK, RACECHECK = "memcheck", "racecheck"
BUILD, EXTENSION = "build", "extension"

PYTEST = [sys.executable, "-m", "pytest", "-p", "checks.gpu.outcomes", "-p", "no:cacheprovider"]
PYTEST += ["-q", "-rfE", "--tb=short", "-o", "timeout=120", "--continue-on-collection-errors"]
# A hung kernel never returns to Python, so a signal cannot end its test, but a thread its process.
TIMED = ["-o", "timeout_method=thread"]
CHECK = """
from fusedops import backends
if "norm" not in backends._WITH_CUDA:
    raise SystemExit("fusedops has no CUDA kernels here: make gpu-once builds them")
"""
PROFILER = ["tests/profiling/test_cuda.py"]
RISKY = "test_cuda or triton and bfloat16 and (forward or gradients)"


def once(run: Run) -> list[Step]:
    """Builds, then asks of every family the questions whose answers matter most."""
    build = Step(BUILD, BUILD_S, _module("checks.gpu.build"))
    return [build, *_after(run, BUILD, RACECHECK)]


def _after(run: Run, needs: str, left_out: str) -> list[Step]:
    """What `gpu-once` does with the build; `gpu-rest` goes on with what did not end there."""
    risky = [*_tests("test_cuda.py"), *_tests("test_kernels.py", "attention")]
    return [
        Step("smoke", SMOKE_S, _module("checks.gpu.smoke", "--out", str(run.out)), (needs,), True),
        Step("tests", TESTS_S, [*_pytest(run), *risky, "-k", RISKY], (needs,), True),
        Step("rows", ROWS_S, _benchmarks(run, "first", 40), (needs,), True),
        Step("counters", COUNTERS_S, _counters(run), (needs,)),
        *(step for step in _sanitizers(run, needs) if step.name != left_out),
    ]


def rest(run: Run) -> list[Step]:
    """What is left after `gpu-once`, with the extension that it built."""
    extension = Step(EXTENSION, 60, [sys.executable, "-c", CHECK])
    llama = "benchmarks/workloads/llama_small.json"
    profile = ["fusedops", "profile", "--model", llama, "--device", "cuda", "--dtype", "bfloat16"]
    profile += ["--batch", "8", "--length", "512", "--json", str(run.out / "profile.json")]
    needs = (EXTENSION,)
    steps = [
        *_after(run, EXTENSION, ""),
        Step("all-tests", CALL_S, [*_pytest(run), *_tests("test_*.py")], needs, True),
        Step("other-rows", CALL_S, _benchmarks(run, "others", 480), needs, True),
        Step("profile", PROFILE_S, _module(*profile), needs),
        Step("profiler-tests", TESTS_S, [*_pytest(run, "profiler-"), *PROFILER], needs, True),
        Step("train", TRAIN_S, _module("benchmarks", "train", "--json", _in(run, "train")), needs),
        Step("compiled-rows", CALL_S, _benchmarks(run, "compiled", 480), needs, True),
    ]
    return [extension, *steps]


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _in(run: Run, name: str) -> str:
    return str(run.out / f"{name}.json")


def _families() -> list[str]:
    """As the Makefile lists them: one folder each in csrc/ops."""
    return sorted(path.name for path in (ROOT / "csrc" / "ops").iterdir() if path.is_dir())


def _tests(pattern: str, *families: str) -> list[str]:
    """Test files of some families, or those of the contract and then of every family."""
    folders = (ROOT / "tests" / name for name in families or ("contract", *_families()))
    found = [path for folder in folders for path in sorted(folder.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in found if path.name != "test_fuzz.py"]


def _pytest(run: Run, of: str = "") -> list[str]:
    """Tests of the GPU's backends on all cores; each outcome is in OUT/outcomes.jsonl at once.

    of: before the file's name, for tests that are not among `all-tests`.
    """
    workers = min(16, os.cpu_count() or 1)
    parallel = ["-n", str(workers), "--dist", "loadgroup", *TIMED] if _has("xdist") else []
    named = [] if _has("pytest_timeout") else ["-W", "ignore::pytest.PytestConfigWarning"]
    outcomes = ["--outcomes", str(run.out / f"{of}outcomes.jsonl")]
    return [*PYTEST, *parallel, *named, *outcomes, "-k", "cuda or triton"]


def _has(module: str) -> bool:
    return find_spec(module) is not None


def _benchmarks(run: Run, part: str, process_s: int) -> list[str]:
    where = ["--out", str(run.out), "--pass", part, "--started", run.started]
    return _module("benchmarks", "gpu", *where, "--process-s", str(process_s))


def _counters(run: Run) -> list[str]:
    """ncu of one row of each family, between cudaProfilerStart and Stop."""
    options = ["--profile-from-start", "off", "--set", "basic", "--clock-control", "none", "--csv"]
    log = ["--log-file", str(run.out / "counters.csv")]
    kernels = _module("checks.gpu.kernels", "--rows")
    return _tool("ncu", [*options, *log, "--launch-count", "24", *kernels])


def _sanitizers(run: Run, needs: str) -> Iterator[Step]:
    """Every kernel once. Without torch's cache each tensor is an allocation with its own bounds.

    An error ends its kernel, not the process, so that the kernels after it are checked too.
    """
    for tool in (MEMCHECK, RACECHECK):
        options = ["--tool", tool, "--target-processes", "application-only"]
        options += ["--error-exitcode", "1", "--destroy-on-device-error", "kernel"]
        options += ["--log-file", str(run.out / f"{tool}.txt")]
        command = _tool("compute-sanitizer", [*options, *_module("checks.gpu.kernels")])
        uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        yield Step(tool, SANITIZER_S, command, (needs,), environment=uncached)


def _tool(name: str, arguments: list[str]) -> list[str]:
    """The command of a tool of CUDA's; if it is missing, one that says so and passes."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    nvcc = os.path.realpath(shutil.which("nvcc") or "")
    folders = [os.environ.get("PATH", ""), f"{home}/bin", os.path.dirname(nvcc)]
    command = shutil.which(name, path=os.pathsep.join(folders))
    if command is None:
        return [sys.executable, "-c", f"print('{name} is not installed: nothing to run')"]
    return [command, *arguments]
