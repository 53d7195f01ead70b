"""Tests `make gpu` on a CPU, with CPU timers instead of the GPU's.

Nothing below is a figure of a GPU, and nothing is written where docs/benchmarks.md would take it
for one.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import ON_GPU
from benchmarks.figures import gpus
from benchmarks.harness import cuda, gpu, record, roofline, sources, suites
from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case, Skip, find
from benchmarks.harness.goals import GpuGoal, table
from benchmarks.harness.memory import Memory
from benchmarks.harness.run import COPY, Result, count_launches
from benchmarks.harness.timing import CPU, Machine, wall
from benchmarks.operators import norm
from fusedops.profiling import timing

ROOT = Path(__file__).parents[2]
DRY = Machine(CPU.device, dict.fromkeys(("device", "graph", "host"), wall), lambda call: 1)
ONLY = (norm.gpu.LAYER_NORM_CALL, "eager", "liger", "fusedops", "fusedops triton")


def small(case):
    """Returns the row with few elements, in a dtype and of contenders that a CPU is quick with."""
    only = tuple(name for name in ONLY if name in case.operation.contenders)
    return replace(case, shape=(4, 64), dtype=torch.float32, only=only)


@pytest.fixture
def family(monkeypatch):
    """Returns the norm family's first row of each clock and mode, and what is asked of them."""
    first = {(case.clock, case.mode): case for case in reversed(norm.GPU_ROWS)}.values()
    asked = [ask for ask in norm.GPU_MUST_SHOW if ask.case in first]
    toy = Namespace(
        GPU_ROWS=[small(case) for case in first],
        GPU_MUST_SHOW=[replace(ask, case=small(ask.case)) for ask in asked],
    )
    monkeypatch.setattr(suites, "family", lambda name: toy)
    monkeypatch.setattr(gpu, "ceilings", lambda m: roofline.ceilings(m, 0.02, 1 << 16, 32))
    monkeypatch.setattr(gpu, "count_apart", lambda *which: gpu.count(*which, DRY))
    return toy


def measured(out, match=""):
    """Returns the exit status of the suite, and the document that it wrote."""
    args = Namespace(families=["norm"], out=str(out), seconds=0.02, match=match)
    status = gpu.measure(args, DRY)
    return status, written(out)


def written(out):
    (path,) = Path(out).glob("*/*")
    assert path.name == "norm.json"
    return json.loads(path.read_text())


@pytest.fixture
def build(monkeypatch):
    """Returns the environment's build record, for tests to change; each run has its own date."""
    about, dates = {"device": "Toy 1", "commit": "abc", "torch": "2", "triton": "3"}, []

    def environment(*_):
        dates.append(f"2000-01-0{len(dates) + 1}")
        return about | {"driver": "1", "date": dates[-1]}

    monkeypatch.setattr(gpu, "environment", environment)
    return about


def test_suite_writes_every_row_with_its_share_of_the_ceiling(family, tmp_path):
    status, document = measured(tmp_path)
    rows = [row for row in document["rows"] if row["status"] == "timed"]
    assert {(r["clock"], r["mode"]) for r in rows} == {(c.clock, c.mode) for c in family.GPU_ROWS}
    (run,) = document["runs"]
    top = run["ceilings"]["copy"]["gb_per_s"]
    for row in rows:
        assert row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert (row["percent_of_copy"] is not None) == (row["clock"] == "device")
        share = pytest.approx(100 * row["gb_per_s"] / top) if row["clock"] == "device" else None
        assert row.get("percent_of_ceiling") == share
    assert document["timed_by"].keys() == {row["clock"] for row in rows}
    left_out = [row for row in document["rows"] if row["status"] != "timed"]
    assert {row["contender"] for row in left_out} == {"liger", "fusedops triton"}
    assert all(row["status"] == "skipped" and row["reason"] for row in left_out)
    launches = {r["contender"]: r["launches"] for r in rows if "launches" in r}
    assert launches == {"fusedops": 1}
    assert document["complete"]
    assert run["ceilings"]["matmul"]["tflop_per_s"] > 0
    assert {"device", "torch", "date", "commit"} <= set(run["environment"])
    missed = [goal for goal in document["goals"] if not goal["met"]]
    assert status == 1 and missed  # Liger's row is missing, if nothing else


def test_what_was_measured_is_kept_when_the_run_is_cut_short(family, tmp_path, monkeypatch):
    run_case = gpu.run_case

    def cut(case, *args, **kwargs):
        if case == family.GPU_ROWS[2]:
            raise KeyboardInterrupt
        return run_case(case, *args, **kwargs)

    monkeypatch.setattr(gpu, "run_case", cut)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path)
    document = written(tmp_path)
    assert not document["complete"]
    assert gpus.figures(tmp_path) == gpus.NOT_YET
    assert {row["mode"] for row in document["rows"]} == {c.mode for c in family.GPU_ROWS[:2]}
    assert any(goal["measured"] is None and not goal["met"] for goal in document["goals"])


def test_match_leaves_rows_out_and_says_so(family, tmp_path):
    _, document = measured(tmp_path, match="host time")
    assert {row["clock"] for row in document["rows"]} == {"host"}
    assert all(("host time" in g["title"]) or not g["met"] for g in document["goals"])
    assert gpus.figures(tmp_path) == gpus.NOT_YET  # it must not stand for a whole run
    with pytest.raises(SystemExit, match="no row of norm has 'nothing'"):
        measured(tmp_path, match="nothing")


def test_parts_of_one_build_make_a_whole(family, build, tmp_path):
    _, first = measured(tmp_path, match="device time")
    assert not first["complete"]
    _, both = measured(tmp_path, match="host time")
    kept = [row for row in both["rows"] if row["clock"] == "device"]
    assert kept == first["rows"] and not both["complete"]
    _, whole = measured(tmp_path, match="graph time")
    assert whole["complete"] and "Toy 1" in gpus.figures(tmp_path)
    assert set(whole["sources"]) == {"norm", "benchmark norm"} and not gpus.stale(whole)
    assert [run["match"] for run in whole["runs"]] == ["device time", "host time", "graph time"]
    _, again = measured(tmp_path, match="time")
    assert {row["run"] for row in again["rows"]} == {"2000-01-04"}
    assert [run["match"] for run in again["runs"]] == ["time"]
    titles = [case.title for case in family.GPU_ROWS]
    assert list(dict.fromkeys(row["title"] for row in again["rows"])) == titles
    assert all(doc["goals"][0].keys() == again["goals"][0].keys() for doc in (first, whole))
    assert len(first["goals"]) == len(again["goals"])


@pytest.mark.parametrize("other", [{"commit": "def"}, {"torch": "2.1"}, {"triton": "4"}], ids=str)
def test_parts_of_two_builds_do_not(family, build, tmp_path, other):
    measured(tmp_path, match="device time")
    build |= other
    _, document = measured(tmp_path, match="host time")
    assert {row["clock"] for row in document["rows"]} == {"host"}


def test_two_changed_trees_are_never_the_same_build():
    tree = dict.fromkeys(record.SAME, "1")
    assert record.same_build(tree, dict(tree))
    for commit in (None, "abc-dirty"):
        assert not record.same_build(tree | {"commit": commit}, tree | {"commit": commit})


def test_launches_are_counted_of_ours_that_run():
    case = replace(small(norm.gpu.CALLED[0]), only=("eager", "fusedops", "fusedops triton"))
    assert count_launches(case, DRY) == {"fusedops": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_launches_are_counted_in_another_process(monkeypatch):
    monkeypatch.setattr(cuda, "require", lambda: None)  # in this one
    with pytest.raises(SystemExit, match="needs a GPU"):
        gpu.count_apart(["norm"], "")


def timed_as(monkeypatch, device_us, host_us, call_us):
    """Returns a machine on which a flush and a call cost that much."""

    def host(call):
        return lambda repeats: (host_us if call is cuda._flush else call_us) / 1e6

    monkeypatch.setattr(cuda, "_flush", lambda: None)
    monkeypatch.setattr(cuda, "_elapsed_s", lambda call, repeats: device_us / 1e6)
    monkeypatch.setattr(cuda, "host", host)
    cuda._lead_s.cache_clear()
    return lambda: None


def test_flushes_put_the_host_ahead_of_the_device(monkeypatch):
    call = timed_as(monkeypatch, device_us=25, host_us=13, call_us=30)
    flushes = cuda.flushes_before(call)
    assert flushes == 6  # 5 times 12 us are twice a call; one more for the cache
    with pytest.raises(RuntimeError, match="takes the device 10 us and the host 12 us"):
        cuda.flushes_before(timed_as(monkeypatch, device_us=10, host_us=12, call_us=30))
    cuda._lead_s.cache_clear()


def test_peer_that_is_not_installed_says_what_is_missing():
    with pytest.raises(Skip, match="no_such_peer"):
        find("no_such_peer.norm", "rms_norm")
    with pytest.raises(Skip, match="no_such_name"):
        find("json", "no_such_name")


def test_every_goal_has_its_row_and_every_operator_its_goals():
    assert all(ask.case in norm.GPU_ROWS for ask in norm.GPU_MUST_SHOW)
    titles = [case.title for case in norm.GPU_ROWS]
    assert len(set(titles)) == len(titles)  # by which rows of several runs are told apart
    asked = {ask.case.title: ask for ask in norm.GPU_MUST_SHOW}
    for name in (operation.name for operation in norm.OPERATIONS):
        for n in (1024, 2048, 4096, 8192, 16384):
            large = f"bfloat16 [16384, {n}], device time"
            assert asked[f"{name} {FORWARD} {large}"].at_least[COPY] == 0.95
            assert asked[f"{name} {BACKWARD} {large}"].at_least[COPY] == 0.84
            assert COPY not in asked[f"{name} {TRAINING} {large}"].at_least
        for tokens in (1, 16, 64):
            few = f"bfloat16 [{tokens}, 4096]"
            ask = asked[f"{name} {FORWARD} {few}, host time"]
            assert ask.launches == 1 and set(ask.at_least.values()) == {1.0, 1.5}
            for mode, clock in ((FORWARD, "graph"), (TRAINING, "host")):
                fewer = asked[f"{name} {mode} {few}, {clock} time"].at_least
                assert len(fewer) == 2 and set(fewer.values()) == {1.5}


def test_every_large_row_is_to_beat_its_rivals():
    asked = {ask.case.title: ask.at_least for ask in norm.GPU_MUST_SHOW}
    large = [case for case in norm.GPU_ROWS if case.clock == "device"]
    kinds = {(case.dtype, case.shape) for case in large}
    assert {(torch.float32, (16384, 4096)), (torch.float16, (16384, 4096))} <= kinds
    assert {(torch.bfloat16, (512, 65536)), (torch.bfloat16, (64, 262144))} <= kinds
    for case in large:
        rivals = [name for name in case.contenders() if name.startswith(("compile", "liger"))]
        rivals = ["eager"] if case.shape == (64, 262144) else rivals
        assert rivals and set(rivals) == asked[case.title].keys() - {COPY}


def test_goal_on_a_gpu_is_met_missed_or_not_measured():
    case = Case(norm.OPERATIONS[0], FORWARD, torch.bfloat16, (8, 8), clock="device")
    ask = GpuGoal(case, {COPY: 0.95, "liger": 1.0}, launches=1)
    result = Result(case, 0, {COPY: [0.9, 0.9], "fusedops": [1.0, 1.0]}, launches={"fusedops": 2})
    verdicts = ask.verdicts(result)
    assert [v["met"] for v in verdicts] == [False, False, False]
    result.seconds |= {COPY: [0.96, 0.96], "liger": [1.0, 1.0]}
    result.launches["fusedops"] = 1
    assert [v["met"] for v in ask.verdicts(result)] == [True, True, True]
    assert table(ask.verdicts(result)).splitlines()[-1].split()[-3:] == ["1", "1", "yes"]
    nothing = ask.verdicts(Result(case, 0))
    assert not any(v["met"] for v in nothing)
    assert table(nothing).count("not timed") == 3


def test_goal_in_milliseconds_tflops_and_bytes():
    case = Case(norm.OPERATIONS[0], FORWARD, torch.bfloat16, (8, 8), clock="device")
    ask = GpuGoal(case, {}, ms=2.0, tflop_per_s=600, beside=100)
    sizes = {"fusedops": Memory(150, 50)}
    result = Result(case, 0, {"fusedops": [2e-3]}, memory=sizes, flops=1_200_000_000_000)
    verdicts = ask.verdicts(result)
    assert [v["what"] for v in verdicts] == ["ms", "TFLOP/s", "bytes beside the results"]
    assert [v["measured"] for v in verdicts] == pytest.approx([2.0, 600.0, 100])
    assert all(v["met"] for v in verdicts)
    result.seconds["fusedops"], sizes["fusedops"] = [2.1e-3], Memory(151, 50)
    assert not any(v["met"] for v in ask.verdicts(result))
    nothing = ask.verdicts(Result(case, 0))
    assert not any(v["met"] for v in nothing) and table(nothing).count("not timed") == 3
    assert table(verdicts).splitlines()[2].split()[-3:] == ["600", "600", "yes"]


def test_memory_on_a_gpu_is_that_of_a_call_after_the_first(monkeypatch):
    calls, now = [], [1000]

    def call():
        calls.append(1)
        return [torch.ones(2), torch.ones(3)]

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now[0] * len(calls))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now[0] + 70)
    assert cuda.memory(call) == Memory(70, 20) and len(calls) == 2


@pytest.mark.parametrize("family", ON_GPU)
def test_every_goal_has_its_row(family):
    module = suites.family(family)
    titles = [case.title for case in module.GPU_ROWS]
    assert len(set(titles)) == len(titles)  # by which rows of several runs are told apart
    goals = [ask.case.title for ask in module.GPU_MUST_SHOW]
    assert set(goals) <= set(titles) and len(set(goals)) == len(goals)


def copied(row, **other):
    return row | {"status": "timed", "dtype": "bfloat16", "launches": 1} | other


def document():
    """Returns a result as a GPU would give it; the figures are made up, as is the device."""
    forward = {"operation": "rms_norm", "mode": FORWARD, "clock": "device"}
    rows = [
        copied(forward, contender=name, shape=[16, n], median_s=s, percent_of_copy=50 / s)
        for n in (64, 128)
        for name, s in (("eager", 2.0 * n), ("liger", 1.5 * n), ("fusedops", n))
    ]
    where = {"device": "Toy 1", "driver": "1", "torch": "2", "triton": "3", "commit": "abc"}
    run = {
        "environment": where | {"date": "2000-01-01T00:00:00"},
        "ceilings": {"copy": {"gb_per_s": 4000.0}, "matmul": {"tflop_per_s": 700.0}},
    }
    return {
        "complete": True,
        "runs": [run],
        "rows": rows,
        "goals": [{"met": True}, {"met": False}],
    }


def test_page_shows_what_was_measured_and_nothing_else(tmp_path):
    assert gpus.figures(tmp_path) == gpus.NOT_YET
    (tmp_path / "toy-1").mkdir()
    (tmp_path / "toy-1" / "norm.json").write_text(json.dumps(document()))
    text = gpus.figures(tmp_path)
    assert "norm on Toy 1" in text and "1 of 2 goals" in text and "4000 GB/s" in text
    assert "| times as fast in device time as | eager | Liger |" in text
    assert "| `rms_norm` forward, bfloat16 | 2.00x | 1.50x |" in text
    assert "*Measured before today's sources, at commit `abc`.*" in text
    current = document() | sources.stamp("norm", device="cuda")
    (tmp_path / "toy-1" / "norm.json").write_text(json.dumps(current))
    assert "before today's sources" not in gpus.figures(tmp_path)
    (tmp_path / "toy-1" / "norm.json").write_text(json.dumps(document() | {"complete": False}))
    assert gpus.figures(tmp_path) == gpus.NOT_YET


def test_page_refuses_what_was_measured_at_no_known_commit(tmp_path):
    found = document()
    found["runs"][0]["environment"]["commit"] = None
    (tmp_path / "toy-1").mkdir()
    (tmp_path / "toy-1" / "norm.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match=r"norm.json: of no known commit; set FUSEDOPS_COMMIT"):
        gpus.figures(tmp_path)


def test_state_of_the_gpu_is_that_of_its_own_line(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    lines = ("GPU-11-aa, 580.1, 345, 3201, 1980, 3201, 700.00, 30", "GPU-22-bb, 580.1" + ", 1" * 6)
    fake.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    state = timing._gpu_state("11-aa")
    assert (state["driver"], state["sm_clock"], state["power_limit"]) == ("580.1", "345", "700.00")
    assert timing._gpu_state("33-cc")["driver"] is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert set(timing._gpu_state("11-aa").values()) == {None}


def test_slug():
    assert timing.slug("NVIDIA H200") == "nvidia-h200"
    assert timing.slug("AMD EPYC (9B14)") == "amd-epyc-9b14"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", [["benchmarks", "gpu"], ["benchmarks.harness.cuda"]], ids=str)
def test_without_a_gpu_it_says_so(command):
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert f"needs a GPU: torch {torch.__version__} finds no CUDA device" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_machine_of_cuda_needs_a_gpu():
    with pytest.raises(SystemExit, match="needs a GPU"):
        cuda.machine()


def make(tmp_path, *targets, broken="nothing"):
    """`make` with an interpreter that writes its arguments down, and fails on `broken`."""
    log, toolkit = tmp_path / "calls", tmp_path / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    for fake in (tmp_path / "python", toolkit / "bin" / "compute-sanitizer"):
        fake.write_text(
            f"#!/bin/sh\necho {fake.name} $TORCH_CUDA_ARCH_LIST $FUSEDOPS_CUDA \"$@\" >> '{log}'\n"
            f'case "$*" in *"{broken}"*) exit 1;; *"-m benchmarks.harness.cuda") echo 9.0a;; esac\n'
        )
        fake.chmod(0o755)
    own = ("MAKE", "MFLAGS", "TORCH_CUDA_ARCH_LIST")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    environment["CUDA_HOME"] = str(toolkit)
    out, stamp = tmp_path / "out", tmp_path / "built-"
    run = subprocess.run(
        ["make", *targets, "PYTHON=python", f"OUT={out}", f"STAMP={stamp}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    return run.returncode, log.read_text()


STEPS = {
    "setup.py": "python 9.0a 1 setup.py egg_info build_ext --inplace",
    "junitxml": "-k cuda or triton",
    "--tool memcheck": "--error-exitcode 1",
    "--tool racecheck": "--error-exitcode 1",
    "fusedops profile": "--device cuda --dtype bfloat16",
    "test_cuda.py": "-m pytest tests/profiling/test_cuda.py",
    "benchmarks gpu": f"-m benchmarks gpu {' '.join(sorted(ON_GPU))} --out",
}


def test_make_gpu_runs_every_step(tmp_path):
    status, calls = make(tmp_path, "gpu")
    assert status == 0
    assert all(call in calls for call in STEPS.values())
    assert calls.index("setup.py") < calls.index("junitxml")


@pytest.mark.parametrize("target", ["gpu-build", "gpu-test"])
def test_what_make_built_before_is_not_taken_for_this_build(tmp_path, target):
    stamp = tmp_path / "built-python-2"
    stamp.touch()
    make(tmp_path, target)
    assert stamp.exists() == (target != "gpu-build")


def test_compute_sanitizer_runs_what_ran_without_it(tmp_path):
    status, calls = make(tmp_path, "gpu-sanitize")
    plain, memory, race = calls.splitlines()[-3:]
    tests = plain.partition(" -m pytest ")[2]
    assert status == 0 and tests
    assert plain.startswith("python") and memory.endswith(tests) and race.endswith(tests)


@pytest.mark.parametrize("broken", [step for step in STEPS if step != "setup.py"])
def test_a_step_that_fails_hides_no_other(tmp_path, broken):
    status, calls = make(tmp_path, "gpu", broken=broken)
    assert status != 0
    assert all(call in calls for call in STEPS.values())


def test_nothing_runs_on_what_was_not_built(tmp_path):
    status, calls = make(tmp_path, "gpu", broken="setup.py")
    assert status != 0 and "-m pytest" not in calls and "benchmarks gpu" not in calls


def test_a_step_can_be_asked_for_alone(tmp_path):
    status, calls = make(tmp_path, "gpu-bench", "FAMILIES=norm adamw")
    assert status == 0
    assert "-m benchmarks gpu norm adamw --out" in calls and "-m pytest" not in calls
