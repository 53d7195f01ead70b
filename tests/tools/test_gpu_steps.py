"""The steps of `make gpu-once` on a CPU: killed tests, and the smoke test."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.harness import suites
from checks.gpu import families, kernels, smoke
from checks.gpu.outcomes import rows
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
        return subprocess.Popen([*command, *options], env=environment, stdout=-1, text=True)

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
    assert "1 passed, 2 deselected" in printed and again.returncode == 0
    assert rows(out)[-1]["test"].endswith("::test_long")


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


def checked(name, layer, capsys):
    failed = smoke.run_family(name, layer)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return failed, lines


@pytest.mark.parametrize("name", backends.FAMILIES)
def test_smoke_checks_every_family(name, capsys):
    failed, lines = checked(name, smoke.Cpu(), capsys)
    assert failed == 0 and all(line["outcome"] == "passed" for line in lines)
    titles = [line["check"] for line in lines]
    assert titles[-1] == smoke.ENDED
    assert any("in a graph" in title for title in titles)
    assert any("second stream" in title for title in titles)
    assert sum("bfloat16" in title for title in titles) >= 1


class Wrong(smoke.Cpu):
    """A device whose second stream and replays give other results, and that is lost then."""

    def beside(self, call):
        return tuple(t + 1 for t in call())

    def captured(self, call):
        return lambda: None, call()


class Lost(Wrong):
    def lost(self):
        return "an illegal access"


def test_smoke_finds_wrong_streams_and_graphs(capsys):
    failed, lines = checked("rotary", Wrong(), capsys)
    bad = [line for line in lines if line["outcome"] != "passed"]
    assert failed == len(bad) == 2 * len(list(families.steps("rotary", torch.device("cpu"))))
    assert {line["outcome"].partition(":")[0] for line in bad} == {"AssertionError"}
    failed, lines = checked("rotary", Lost(), capsys)
    assert failed == 1 and lines[-1] == {
        "family": "rotary",
        "check": "device",
        "outcome": "an illegal access",
    }


def test_smoke_keeps_what_a_dead_process_printed(tmp_path, monkeypatch):
    """And does not repeat families that came to an end."""
    path = tmp_path / "smoke.jsonl"
    ended = {"family": "norm", "check": smoke.ENDED, "outcome": "passed"}
    path.write_text(json.dumps(ended) + "\n")
    fake = tmp_path / "python"
    row = {"family": "rotary", "check": "a", "outcome": "passed"}
    fake.write_text(f"#!/bin/sh\necho '{json.dumps(row)}'\necho boom >&2\nkill -SEGV $$\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(sys, "argv", ["smoke", "--out", str(tmp_path)])
    assert smoke.main() == 1
    found = smoke.rows(path)
    assert {r["family"] for r in found if r["check"] == "a"} == {"rotary"}
    dead = [r for r in found if r["check"] == "process"]
    assert len(dead) == len(backends.FAMILIES) - 1 and "boom" in dead[0]["outcome"]


def test_every_kernel_and_every_first_row_can_be_called(monkeypatch, capsys):
    assert kernels.every_kernel(torch.device("cpu")) == 0
    assert capsys.readouterr().out.count(": done") == len(backends.FAMILIES)
    monkeypatch.setattr(kernels, "LARGEST", 8)
    names = [n for n in backends.FAMILIES if n != "quantized_linear"]  # whose groups need more
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
