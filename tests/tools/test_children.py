"""Child processes that run too long are killed, and the failure has their stacks."""

import subprocess
import time

import pytest
from children import forked, results

WAITS = """
import os, sys, time
def for_ever():
    print(os.getpid(), flush=True)
    time.sleep(600)
os.fork()
for_ever()
"""


@pytest.fixture
def waiting(monkeypatch):
    """Two processes that wait, the second a child of the first."""
    monkeypatch.setenv("PATH", "")  # gdb takes long to read torch's symbols
    process = forked("-c", WAITS)
    until(lambda: process._read(process.streams[0]).count("\n") == 2)
    return process


def until(happens):
    """Waits longer than a busy machine takes."""
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_processes_are_killed_and_their_stacks_are_printed(waiting):
    ends = forked("-c", "print('fine')")
    until(ends.has_ended)
    with pytest.raises(subprocess.TimeoutExpired) as error:
        results([ends, waiting], timeout=0.1)
    notes = "\n".join(error.value.__notes__)
    assert notes.count("in for_ever") == 2, notes
    numbers = [int(line) for line in notes.splitlines() if line.isdecimal()]
    assert len(numbers) == 2, notes
    until(lambda: not any(_runs(number) for number in numbers))


def _runs(process: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # ProcessLookupError if it ends after open
        return False


def test_results_have_the_order_of_the_processes():
    codes = "import time; time.sleep(0.3); print('first')", "raise SystemExit(3)"
    first, second = results([forked("-c", code) for code in codes], timeout=60)
    assert (first.stdout, first.returncode, second.returncode) == ("first\n", 0, 3)
