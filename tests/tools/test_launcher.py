"""Compiled Triton kernels are launched from C++ exactly as Triton launches them.

Each part runs in a process of its own, where a stub replaces CUDA's driver.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from checks.launcher import command
from checks.machine_code.launches import FAMILIES
from fusedops.extension import UNCOMPILED

CHECKS = Path(__file__).parents[1] / "children" / "launcher_checks.py"

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's own driver is loaded"),
    pytest.mark.skipif(bool(UNCOMPILED), reason="the launcher is compiled"),
]


def test_all_checks_pass_on_a_stub_of_the_driver():
    env = os.environ | command.environment(None)
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", str(CHECKS)]
    run = subprocess.run(words, cwd=command.ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_familys_launches_are_tritons():
    found = command.child("compare", FAMILIES, True)
    assert not found["wrong"] and found["launches"] >= 100
    assert len(found["variants"]) >= 20
    assert all(len(handles) for handles in found["variants"].values())
    assert max(found["arguments"].values()) >= 50


@pytest.mark.parametrize("family", FAMILIES)
def test_one_key_of_ours_is_one_key_of_tritons(family):
    """Whatever the arguments are."""
    found = command.child("hostile", [family], False)
    assert not found["wrong"] and found["calls"] > 1000 and found["refused"] > 100
    for ours, theirs in found["kernels"].values():
        assert theirs <= ours <= 1.5 * theirs


def test_a_launch_costs_the_host_a_fraction_of_tritons(capsys):
    """`python -m checks launcher timing` measures it; this machine may be busy."""
    times = command.child("timing", True)
    assert len(times) == 8 and all(0 < one["ours"] < one["triton"] / 2 for one in times)
    assert max(one["arguments"] for one in times) >= 50


def test_the_command_reports_differences(monkeypatch, capsys):
    found = {
        "launches": 2,
        "variants": {"k": [1]},
        "arguments": {},
        "wrong": ["k: another variant"],
    }
    slow = [{"launch": "k", "arguments": 3, "triton": 50.0, "ours": 9.5}]
    monkeypatch.setattr(command, "child", lambda part, *_, path: {"timing": slow}.get(part, found))
    monkeypatch.setattr(command, "version", lambda path: "3.9.0")
    args = command.argparse.Namespace(parts=["compare", "timing"], quick=True, triton=[])
    assert command.run(args) == 1
    printed = capsys.readouterr().out
    assert "Not run on a GPU" in printed and "k: another variant" in printed
    assert "k: 9.5 us, not 9" in printed and "2 failures" in printed
