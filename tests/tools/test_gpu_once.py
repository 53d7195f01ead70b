"""`make gpu-once` and `gpu-rest` with a fake device and invented times.

Failed, hung and killed steps must not cost the other steps' results, nor the limit.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from checks.gpu import __main__ as command
from checks.gpu import dry, plan
from checks.gpu.runner import FAILED, LATE, NOT_RUN, PASSED, Run, Step, whole_lines

ROOT = Path(__file__).parents[2]
ONCE = ["build", "smoke", "tests", "rows", "counters", "memcheck"]
FILES = {"smoke.jsonl", "outcomes.jsonl", "toy-gpu/attention.json", "counters.csv", "memcheck.txt"}
START_S = 3.0  # of real time, for Python's start and end on a busy machine


def environment(broken=""):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return kept | {"DRY_BROKEN": broken}


def called(out, which="once", broken=""):
    """Returns the exit status, the output, and the seconds of the plan that it took."""
    begin = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "checks.gpu", which, "--dry", "--out", str(out)],
        cwd=ROOT,
        env=environment(broken),
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout, (time.monotonic() - begin - START_S) / dry.SCALE


def outcomes(out):
    steps = json.loads((out / "state.json").read_text())["steps"]
    return {name: step["status"] for name, step in steps.items()}


def archived(out):
    """The archive's files of results, without the first folder."""
    with tarfile.open(out / "gpu.tgz") as archive:
        return {
            name.removeprefix("gpu/"): archive.extractfile(name).read()
            for name in archive.getnames()
        }


def test_it_ends_with_everything_in_the_archive(tmp_path):
    status, output, seconds = called(tmp_path)
    assert status == 0, output
    assert outcomes(tmp_path) == dict.fromkeys(ONCE, PASSED) and seconds < plan.CALL_S
    found = archived(tmp_path)
    assert set(found) == FILES | {f"{name}.log" for name in ONCE} | {"state.json", "build.txt"}
    assert found["rows.log"].count(b"rows: ") == dry.LINES
    assert "[0:" in output and "rows: 10 of 10" in output  # progress, with its time


def broken_run(out, broken, **wrong):
    """Runs with broken steps, of which each ends as said and the others pass; output and files."""
    status, output, seconds = called(out, broken=broken)
    assert status == 1 and seconds < plan.CALL_S
    assert outcomes(out) == dict.fromkeys(ONCE, PASSED) | wrong
    return output, archived(out)


def test_steps_that_fail_or_die_cost_nothing_else(tmp_path):
    output, files = broken_run(tmp_path, "smoke=fails tests=dies", smoke=FAILED, tests=FAILED)
    assert b"a planted failure" in files["smoke.log"]
    assert files["outcomes.jsonl"].count(b"\n") == dry.LINES // 2 + 1  # all until it died
    assert "failed" in output.partition("step ")[2]


def test_steps_that_hang_end_at_their_limit(tmp_path):
    """They ignore SIGINT and SIGTERM. The steps after them have their own seconds."""
    output, files = broken_run(tmp_path, "rows=hangs memcheck=hangs", rows=LATE, memcheck=LATE)
    assert files["toy-gpu/attention.json"].count(b"\n") == dry.LINES // 2 + 1
    assert "left for make gpu-rest: rows, memcheck" in output


def test_nothing_runs_on_what_was_not_built(tmp_path):
    status, output, _ = called(tmp_path, broken="build=fails")
    assert status == 1 and "make gpu-once builds again" in output
    assert outcomes(tmp_path) == dict.fromkeys(ONCE, NOT_RUN) | {"build": FAILED}
    assert "smoke] not run: build did not pass" in output
    assert b"a planted failure" in archived(tmp_path)["build.log"]


def test_rest_continues_where_it_stopped(tmp_path):
    called(tmp_path, broken="rows=hangs smoke=fails")
    before = outcomes(tmp_path)
    status, output, seconds = called(tmp_path, "rest")
    assert seconds < plan.CALL_S and "nothing is left" in output
    after = outcomes(tmp_path)
    assert after["rows"] == after["compiled-rows"] == after["racecheck"] == PASSED
    assert after["smoke"] == before["smoke"] == FAILED and status == 1  # it came to an end
    lines = (tmp_path / "tests.log").read_text()
    assert lines.count("tests: 1 of") == 1  # passed the first time
    assert (tmp_path / "build.log").read_text().count("build: 1 of") == 1


def test_it_can_be_terminated(tmp_path):
    """As a machine does that is given back: the archive has what was written by then."""
    command = [sys.executable, "-m", "checks.gpu", "once", "--dry", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment("smoke=hangs"), stdout=-1) as run:
        while not (tmp_path / "smoke.jsonl").exists():
            time.sleep(0.05)
            assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        output = run.communicate(timeout=60)[0]
    assert run.returncode == 128 + signal.SIGTERM and b"everything is in" in output
    assert outcomes(tmp_path) == {"build": PASSED, "smoke": LATE}
    assert {"build.log", "smoke.log", "smoke.jsonl", "state.json"} <= archived(tmp_path).keys()


@pytest.mark.parametrize("which", ["once", "rest"])
def test_make_passes_its_variables_on(tmp_path, which):
    given = ["OUT=results", "ARCHIVE=all.tgz", "DRY=1", "ONLY=rows smoke", "PYTHON=python9"]
    run = ["make", "--dry-run", f"gpu-{which}", *given]
    printed = subprocess.check_output(run, cwd=ROOT, env=environment(), text=True)
    words = f"python9 -m checks.gpu {which} --out results --archive all.tgz --dry --only rows"
    assert " ".join(printed.replace("\\\n", " ").split()) == f"{words} --only smoke"


def test_a_steps_children_are_ended_too(tmp_path):
    run = Run(tmp_path, 60.0)
    child = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('started')"
    step = Step("parent", 10.0, [sys.executable, "-c", child])
    begin = time.monotonic()
    assert run.step(step, 20.0) == PASSED and time.monotonic() - begin < 15


class Invented(Run):
    """A run whose steps take invented seconds and end with invented exit statuses."""

    def __init__(self, out, takes, codes=None):
        super().__init__(out, plan.CALL_S, 0.5)  # not 1: the archive is without the extension
        self.clock, self.takes, self.codes, self.limits = 0.0, takes, codes or {}, {}

    def now(self):
        return self.clock

    def _process(self, step, end):
        self.limits[step.name] = end - self.clock
        late = self.clock + self.takes.get(step.name, 5.0) > end
        self.clock = end if late else self.clock + self.takes.get(step.name, 5.0)
        return None if late else self.codes.get(step.name, 0)


def called_again(run):
    """The next call of `gpu-rest`. Returns the steps that are left."""
    run.clock = 0.0
    run.limits.clear()
    return command._rest(run, plan.rest(run), run.out / "all.tgz")


def test_a_slow_build_takes_the_time_of_steps_that_need_it(tmp_path):
    run = Invented(tmp_path, {"build": 300.0, "smoke": 200.0, "rows": 20.0})
    left = command._once(run, plan.once(run), tmp_path / "all.tgz")
    assert run.limits["build"] > 500 and run.passed("tests") and run.passed("rows")
    assert run.limits["smoke"] == plan.SMOKE_S and run.clock <= plan.CALL_S
    assert left == ["smoke"]


def test_what_has_no_time_left_is_left_for_the_next_call(tmp_path):
    run = Invented(tmp_path, {"build": 470.0, "smoke": 85.0})
    left = command._once(run, plan.once(run), tmp_path / "all.tgz")
    assert run.clock <= plan.CALL_S and left == [name for name in ONCE if name != "build"]
    assert run.limits.keys() == {"build", "smoke"}


def test_a_step_that_was_late_gets_twice_the_time_until_it_is_given_up(tmp_path):
    run = Invented(tmp_path, {"train": 1000.0, "memcheck": 70.0})
    limits = []
    while left := called_again(run):
        limits.append(run.limits.get("train"))
        assert len(limits) < 9, left
    assert limits == [plan.TRAIN_S, 2 * plan.TRAIN_S] and run.limits["train"] == command.LONGEST_S
    assert run.passed("memcheck") and not run.passed("train")


@pytest.mark.parametrize("code", [2, 3, -11, 137])
def test_a_crash_of_a_step_that_resumes_is_not_its_end(tmp_path, code):
    """pytest ends with 2 and 3 if it was interrupted or has an error of its own."""
    run = Invented(tmp_path, {}, {"tests": code, "smoke": 1, "train": code})
    assert called_again(run) == ["tests"]
    assert run.steps["train"]["status"] == run.steps["smoke"]["status"] == FAILED
    run.codes.clear()
    assert called_again(run) == [] and run.limits.keys() == {"extension", "tests"}


def test_a_step_that_cannot_start_and_an_archive_that_cannot_be_written(tmp_path, capsys):
    run = Run(tmp_path / "out", 60.0)
    steps = [Step("a", 5.0, ["/no/such/file"]), Step("b", 15.0, [sys.executable, "-c", ""])]
    left = command._once(run, steps, tmp_path / "missing" / "all.tgz")
    assert left == [] and run.passed("b") and run.steps["a"]["code"] == 127
    printed = capsys.readouterr().out
    assert "FileNotFoundError" in printed and "all.tgz could not be written" in printed


def test_broken_lines_are_skipped(tmp_path):
    (tmp_path / "a").write_text('{"a": 1}\n{"b": {"c": 1}{"d": 2}\n\n{"e": 3}\n{"cut')
    assert whole_lines(tmp_path / "a") == [{"a": 1}, {"e": 3}]
    assert whole_lines(tmp_path / "missing") == []


def test_a_step_that_does_not_exist_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["once", "--dry", "--out", str(tmp_path), "--only", "row"])
    assert "--only must be one of build, smoke, tests, rows" in capsys.readouterr().err


def test_the_limits_leave_time_for_the_archive():
    run = Run.__new__(Run)
    run.out, run.started = Path("out"), "now"
    once = plan.once(run)
    assert [step.name for step in once] == ONCE
    assert sum(step.seconds for step in once) + 10 <= plan.CALL_S <= 9 * 60
    rest = plan.rest(run)
    every = next(step.command for step in rest if step.name == "all-tests")
    on_gpus = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/test_cuda.py")}
    assert on_gpus <= {*every, *plan.PROFILER} and "tests/contract/test_errors.py" in every
    assert {step.name for step in rest} | {"build"} == dry.TAKES.keys()
    assert all(step.resumes or step.seconds <= plan.CALL_S / 2 for step in rest)
    for step in [*once, *rest]:
        for path in [word for word in step.command if word.startswith("tests/")]:
            assert (ROOT / path).exists()
    (tests,) = [step for step in once if step.name == "tests"]
    files = [word for word in tests.command if word.startswith("tests/")]
    assert files[0] == "tests/contract/test_cuda.py" and "tests/adamw/test_cuda.py" in files
    assert "tests/attention/test_kernels.py" in tests.command


@pytest.mark.parametrize("name", ["counters", "memcheck"])
def test_a_tool_that_is_missing_is_said_to_be(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    run = Run(tmp_path / "out", 60.0)
    (step,) = [step for step in plan.once(run) if step.name == name]
    said = subprocess.run(step.command, capture_output=True, text=True, check=True).stdout
    assert "is not installed: nothing to run" in said
