"""Tests `make gpu` on a CPU: the script with invented steps, and the smoke test."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from children import forked

from checks.gpu import families, smoke
from fusedops import backends

ROOT = Path(__file__).parents[2]
# An interpreter whose steps write a result, and fail or hang if FAILS or HANGS names their module.
INVENTED = """#!/bin/sh
echo "$2 ran"
case "$2" in
  "$FAILS") exit 3;;
  "$HANGS") sleep 100;;
esac
"""
STEPS = {"build": "checks.gpu.build", "smoke": "checks.gpu.smoke"}
STEPS |= {"tests": "pytest", "benchmarks": "benchmarks"}


@pytest.fixture
def script(tmp_path):
    """Returns a function that starts the script with invented steps."""
    python = tmp_path / "python"
    python.write_text(INVENTED)
    python.chmod(0o755)

    def start(**variables):
        environment = os.environ | {"PYTHON": str(python), "RESULTS": str(tmp_path / "out")}
        return subprocess.Popen(
            ["checks/gpu/run.sh"],
            cwd=ROOT,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def archived(folder):
    with tarfile.open(folder / "out.tar.gz") as archive:
        return {name for name in archive.getnames() if name.endswith(".log")}


LOGS = {f"out/{name}.log" for name in STEPS}


def test_all_steps_run_and_are_archived(script, tmp_path):
    run = script()
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and not err and "passed" in out
    assert archived(tmp_path) == LOGS
    for name, module in STEPS.items():
        assert (tmp_path / "out" / f"{name}.log").read_text() == f"{module} ran\n"


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_fails_is_named_and_the_others_run(script, tmp_path, name):
    run = script(FAILS=STEPS[name])
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and f"failed: {name} (3);" in err
    assert archived(tmp_path) == LOGS


def test_a_step_that_hangs_ends_at_its_limit(script, tmp_path):
    run = script(HANGS=STEPS["smoke"], SMOKE_S="1")
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and "failed: smoke (124);" in err
    assert archived(tmp_path) == LOGS


def test_an_interrupted_run_is_archived(script, tmp_path):
    run = script(HANGS=STEPS["tests"], TESTS_S="2")
    log = tmp_path / "out" / "tests.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and "interrupted" in err
    assert archived(tmp_path) == LOGS - {"out/benchmarks.log"}


def checked(name, layer, capsys):
    """How many checks failed, and each check's outcome."""
    failed = smoke.run_family(name, layer)
    lines = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    return failed, {title.partition(", ")[2]: outcome for title, _, outcome in lines}


@pytest.mark.parametrize("name", backends.FAMILIES)
def test_smoke_checks_every_family(name, capsys):
    failed, outcomes = checked(name, smoke.Cpu(), capsys)
    assert failed == 0 and set(outcomes.values()) == {"passed"}
    assert any("in a graph" in title for title in outcomes)
    assert any("second stream" in title for title in outcomes)
    dtypes = [word for title in outcomes if "float" in (word := title.rpartition(" ")[2])]
    assert dtypes == sorted(dtypes, key=["bfloat16", "float16", "float32"].index)
    assert {*dtypes} == {"bfloat16", "float16", "float32"}
    assert next(iter(outcomes)).endswith("bfloat16")


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
    failed, outcomes = checked(name, Wrong(), capsys)
    wrong = [outcome for outcome in outcomes.values() if outcome != "passed"]
    assert failed == len(wrong) == 2 * len(list(families.steps(name, torch.device("cpu"))))
    assert all(outcome.startswith("FAILED: AssertionError") for outcome in wrong)


def test_smoke_ends_a_process_whose_device_is_lost(capsys):
    assert smoke.run_family("rotary", Lost()) == 1
    assert capsys.readouterr().out.endswith("rotary: the device is lost: an illegal access\n")


@pytest.mark.parametrize("crash", ["raise SystemExit(1)", "os.kill(os.getpid(), 11)"])
def test_smoke_runs_every_family_and_names_those_that_fail(monkeypatch, capfd, tmp_path, crash):
    child = tmp_path / "python"
    child.write_text(f"#!{sys.executable}\nimport os, sys\nif 'norm' in sys.argv:\n    {crash}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    assert smoke.main([]) == 1
    assert capfd.readouterr().out.endswith("failed: norm\n")


def test_smoke_passes_if_every_family_does(monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", "true")
    assert smoke.main([]) == 0
    assert capfd.readouterr().out.endswith("failed: none\n")


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
    assert " passed" in forked("-c", WITHOUT, *tests, cwd=ROOT).printed()
