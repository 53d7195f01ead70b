"""Tests steps of `make gpu-once` on a CPU: the outcomes plugin and the smoke test."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.harness import suites
from benchmarks.harness.gpu import by_doubt
from checks.gpu import families, kernels, smoke
from checks.gpu.outcomes import rows
from checks.gpu.runner import LATE, Run, Step
from fusedops import backends

ROOT = Path(__file__).parents[2]
TESTS = """
import os, time

def test_right():
    pass

def test_wrong():
    planted = 17
    assert planted == 18

def test_long():
    time.sleep(float(os.environ["LONG_S"]))
"""


@pytest.fixture
def tests(tmp_path):
    """Returns a function that starts pytest on TESTS, with the plugin."""
    (tmp_path / "test_toy.py").write_text(TESTS)

    def start(*options, seconds, more=""):
        (tmp_path / "conftest.py").write_text(more)
        command = [sys.executable, "-m", "pytest", str(tmp_path), "-p", "checks.gpu.outcomes"]
        command += ["--outcomes", str(tmp_path / "out.jsonl"), "-p", "no:cacheprovider", "-q"]
        kept = {k: v for k, v in os.environ.items() if k != "FUSEDOPS_TESTS_BEGIN"}
        environment = kept | {"PYTHONPATH": str(ROOT), "LONG_S": str(seconds)}
        # A shell's background jobs ignore SIGINT, and what they start inherits that.
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        command += options
        return subprocess.Popen(command, env=environment, stdout=-1, text=True, preexec_fn=heed)

    return start


def of_toy(path):
    return [(row["test"].partition("::")[2], row["outcome"]) for row in rows(path)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=str)
def test_a_signal_loses_no_outcome(tests, tmp_path, number, workers):
    if workers:
        pytest.importorskip("xdist")
    out, report = tmp_path / "out.jsonl", tmp_path / "tests.xml"
    run = tests(*workers, f"--junitxml={report}", seconds=600)
    while len(rows(out)) < 2:
        assert run.poll() is None
        time.sleep(0.1)
    run.send_signal(number)
    printed, _ = run.communicate(timeout=60)
    assert of_toy(out) == [("test_right", "passed"), ("test_wrong", "failed")]
    assert "planted = 17" in rows(out)[1]["why"] and "assert 17 == 18" in rows(out)[1]["why"]
    if number != signal.SIGKILL:  # pytest ends by itself, with its own report
        assert "planted = 17" in printed and "test_wrong" in report.read_text()


def test_a_later_run_leaves_out_what_has_an_outcome(tests, tmp_path):
    out = tmp_path / "out.jsonl"
    run = tests(seconds=600)
    while len(rows(out)) < 2:
        time.sleep(0.1)
    run.terminate()
    run.communicate(timeout=60)
    with out.open("a") as file:
        file.write('{"test": "cut sho')  # by SIGKILL
    again = tests(seconds=0)
    printed, _ = again.communicate(timeout=60)
    assert "1 passed, 2 deselected" in printed and rows(out)[-1]["test"].endswith("::test_long")
    assert again.returncode == 1  # that of all tests, in whichever run they failed
    assert "FAILED in an earlier run: " in printed and "::test_wrong" in printed


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=str)
def test_no_test_left_is_no_error(tests, tmp_path, workers):
    if workers:
        pytest.importorskip("xdist")
    first = tests(*workers, "-k", "right", seconds=0)
    first.communicate(timeout=60)
    again = tests(*workers, "-k", "right", seconds=0)
    printed, _ = again.communicate(timeout=60)
    assert (first.returncode, again.returncode) == (0, 0) and "passed" not in printed
    (tmp_path / "out.jsonl").unlink()
    misspelt = tests(*workers, "-k", "rihgt", seconds=0)
    misspelt.communicate(timeout=60)
    assert misspelt.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


LOST = """
from checks.gpu import outcomes
outcomes._lost = lambda: "an illegal access"
"""


def test_a_process_whose_device_is_lost_ends(tests, tmp_path):
    """pytest-xdist starts another one, which runs the other tests."""
    pytest.importorskip("xdist")
    run = tests("-n", "1", seconds=0, more=LOST)
    run.communicate(timeout=120)
    found = dict(of_toy(tmp_path / "out.jsonl"))
    assert found["test_wrong"] == "failed" and found["test_long"] == "passed"
    assert "planted = 17" in rows(tmp_path / "out.jsonl")[1]["why"]
    alone = tests(seconds=0, more=LOST)
    (tmp_path / "out.jsonl").unlink()
    printed, _ = alone.communicate(timeout=120)
    assert alone.returncode == 3 and "the device is lost after" in printed
    assert dict(of_toy(tmp_path / "out.jsonl")) == {"test_right": "passed", "test_wrong": "failed"}


def checked(name, layer, capsys, left_out=frozenset()):
    """How many checks failed, and the last row of each."""
    failed = smoke.run_family(name, layer, left_out)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return failed, [*{line["check"]: line for line in lines}.values()]


@pytest.mark.parametrize("name", backends.FAMILIES)
def test_smoke_checks_every_family(name, capsys):
    failed, lines = checked(name, smoke.Cpu(), capsys)
    assert failed == 0 and all(line["outcome"] == "passed" for line in lines)
    titles = [line["check"] for line in lines]
    assert titles[-1] == smoke.ENDED
    assert any("in a graph" in title for title in titles)
    assert any("second stream" in title for title in titles)
    first = [title.rpartition(" ")[2] for title in titles[:-1]]
    own = [dtype for dtype in first if "float" in dtype]
    assert own == sorted(own, key=["bfloat16", "float16", "float32"].index)
    assert {*own} == {"bfloat16", "float16", "float32"} and first[0] == "bfloat16"


class Wrong(smoke.Cpu):
    """A device whose kernels run on the first stream, and whose replays do nothing."""

    def beside(self, write, call):
        results = call()
        write()
        return results

    def captured(self, call):
        return lambda: None, call()


class Lost(Wrong):
    """One that is lost by an illegal access, too."""

    def lost(self):
        return "an illegal access"


@pytest.mark.parametrize("name", backends.FAMILIES)
def test_smoke_finds_wrong_streams_and_graphs(name, capsys):
    failed, lines = checked(name, Wrong(), capsys)
    bad = [line for line in lines if line["outcome"] != "passed"]
    assert failed == len(bad) == 2 * len(list(families.steps(name, torch.device("cpu"))))
    assert {line["outcome"].partition(":")[0] for line in bad} == {"AssertionError"}


def test_smoke_ends_a_process_whose_device_is_lost(capsys):
    failed, lines = checked("rotary", Lost(), capsys)
    assert failed == 1 and lines[-1]["outcome"] == "an illegal access"
    assert lines[-1]["check"] == smoke.DEVICE and lines[-2]["outcome"] != "passed"
    known = frozenset(line["check"] for line in lines)
    assert lines[-2]["check"] not in [
        c["check"] for c in checked("rotary", Lost(), capsys, known)[1]
    ]


PYTHON = """#!{python}
import json, os, signal, sys
family = sys.argv[sys.argv.index("--family") + 1]
with open({folder!r} + "/starts-" + family, "a+") as file:
    file.write("x")
    file.seek(0)
    start = len(file.read())

def say(check, outcome):
    print(json.dumps(dict(family=family, check=check, outcome=outcome)), flush=True)

{body}
"""


@pytest.fixture
def smoked(tmp_path, monkeypatch):
    """Returns a function: the smoke test with processes that run `body`; `start` counts them."""
    path, python = tmp_path / "smoke.jsonl", tmp_path / "python"

    def run(body, only=("norm", "rotary")):
        python.write_text(PYTHON.format(python=sys.executable, folder=str(tmp_path), body=body))
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr(sys, "argv", ["smoke", "--out", str(tmp_path)])
        monkeypatch.setattr(backends, "FAMILIES", dict.fromkeys(only))
        return smoke.main(), smoke.latest(path)

    return run


def test_smoke_goes_on_after_a_crash(smoked, tmp_path, capsys):
    """A check that crashes twice is left out; families that have ended are not repeated."""
    ended = {"family": "norm", "check": smoke.ENDED, "outcome": "passed"}
    (tmp_path / "smoke.jsonl").write_text(json.dumps(ended) + "\n")
    status, found = smoked("""
say("a", "begun")
if start < 3:
    sys.stderr.write("boom" * 100000)  # more than a pipe holds
    os.kill(os.getpid(), signal.SIGSEGV)
print("a library's own line")
say("b", "passed")
say("ended", "passed")
""")
    assert [(r["family"], r["check"], r["outcome"]) for r in found[1:]] == [
        ("rotary", "a", "begun"),
        ("rotary", "b", "passed"),
        ("rotary", "ended", "passed"),
    ]
    assert status == 1 and "FAILED rotary a: begun" in capsys.readouterr().out
    dead = [r for r in smoke.rows(tmp_path / "smoke.jsonl") if r["check"] == smoke.PROCESS]
    assert len(dead) == 2 and "boom" in dead[0]["outcome"] and len(dead[0]["outcome"]) < 5000
    assert "boom" in (tmp_path / "smoke-rotary.log").read_text()


def test_smoke_says_what_is_left(smoked, capsys):
    """Then the runner calls it again, though it failed."""
    status, _ = smoked("raise SystemExit(1)")
    assert status == 2 and "checks are left: norm, rotary" in capsys.readouterr().out


def test_the_runner_ends_the_smoke_tests_processes(tmp_path):
    """They are in its process group: none is left with the GPU."""
    child = tmp_path / "python"
    child.write_text("#!/bin/sh\nsleep 61\n")
    child.chmod(0o755)
    code = (
        "import sys; from checks.gpu import smoke; sys.executable = sys.argv.pop(1); smoke.main()"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", code, str(child), "--out", str(out)]
    run = Run(out, 600.0)
    begin = time.monotonic()
    assert run.step(Step("smoke", 0.0, command), 20.0) == LATE and time.monotonic() - begin < 40
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(child) not in listed


def test_every_kernel_and_every_first_row_can_be_called(monkeypatch, capsys):
    assert kernels.every_kernel(torch.device("cpu")) == 0
    assert capsys.readouterr().out.count(": done") == len(backends.FAMILIES)
    monkeypatch.setattr(kernels, "LARGEST", 8)
    names = [n for n in by_doubt(backends.FAMILIES) if n != "quantized_linear"]  # its groups
    monkeypatch.setattr(backends, "FAMILIES", dict.fromkeys(names))
    kernels.first_rows(torch.device("cpu"))
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == names
    assert all(suites.family(name).GPU_FIRST for name in names)


WITHOUT = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "expecttest" else found(name, *rest)
sys.modules.pop("expecttest", None)
import pytest
sys.exit(pytest.main([*sys.argv[1:], "-q", "-p", "no:cacheprovider"]))
"""


def test_opcheck_runs_where_expecttest_is_missing():
    """As on a GPU machine without a network."""
    tests = ["tests/contract/test_compilers.py", "-k", "opcheck and norm-layer_norm and float32"]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, *tests], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
