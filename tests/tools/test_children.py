"""Child processes that run too long are killed, and the failure has their stacks."""

import os
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


def test_all_processes_are_killed_and_their_stacks_are_printed(monkeypatch):
    monkeypatch.setenv("PATH", "")  # gdb takes long to read torch's symbols
    waiting, ends = forked("-c", WAITS), forked("-c", "print('fine')")
    with pytest.raises(subprocess.TimeoutExpired) as error:
        results([ends, waiting], timeout=2)
    notes = "\n".join(error.value.__notes__)
    assert notes.count("in for_ever") == 2, notes
    numbers = [int(line) for line in notes.splitlines() if line.isdecimal()]
    assert len(numbers) == 2, notes
    time.sleep(0.5)  # for the kernel
    assert not any(_runs(number) for number in numbers)


def _runs(process: int) -> bool:
    """Whether it is there and no zombie."""
    status = f"/proc/{process}/stat"
    if not os.path.exists(status):
        return False
    with open(status, encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_results_have_the_order_of_the_processes():
    codes = "import time; time.sleep(0.3); print('first')", "raise SystemExit(3)"
    first, second = results([forked("-c", code) for code in codes], timeout=60)
    assert (first.stdout, first.returncode, second.returncode) == ("first\n", 0, 3)
