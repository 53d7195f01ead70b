"""patch's report and the Trainer's callback name keep_freed_memory, with its measured gain."""

import logging
import mmap
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fusedops import allocator, patch
from fusedops.measuring import faults
from fusedops.measuring.faults import PageFaults, fault_seconds, fault_share

SIZE = 2**26  # bytes, above what glibc ever keeps by itself
HINT = 'not measured: `fusedops.profile(step).measure("keep_freed_memory")`'
GAIN = re.compile(
    r"page faults take (\d+)% of the CPU time of (.*): fusedops.keep_freed_memory\(\)"
)


def fault():
    with mmap.mmap(-1, SIZE) as fresh:
        for page in range(0, SIZE, mmap.PAGESIZE):
            fresh[page] = 1


def compute(products=2):
    kept = torch.ones(256, 256)
    for _ in range(products):
        torch.mm(kept, kept, out=torch.empty_like(kept))


class Allocates(nn.Module):
    """A norm beside tensors whose memory is fresh, if they have a size."""

    def __init__(self, size):
        super().__init__()
        self.norm, self.size = nn.LayerNorm(8), size

    def forward(self, x):
        for _ in range(4):
            torch.ones(self.size, dtype=torch.uint8)
        return self.norm(x)


class Large(Allocates):
    def __init__(self):
        super().__init__(1)
        self.weight = nn.Parameter(torch.empty(SIZE // 4))


def lines(model, **options):
    """What patch's report says on freed memory."""
    return [note for note in patch(model, **options).notes if "keep_freed_memory" in note]


def counted(call):
    counts = PageFaults()
    call()
    counts.stop()
    return counts


def test_share():
    assert fault_share(3.0, 1.0, 100, 0.004) == pytest.approx(0.1)
    assert fault_share(3.0, 1.0, 1000, 0.004) == 0.25  # all of the system's time
    assert fault_share(0.0, 0.0, 0, 0.004) == 0.0


def test_counts_of_several_intervals():
    counts = counted(fault)
    fault()  # between two intervals
    counts.start()
    fault()
    counts.stop()
    pages = SIZE // mmap.PAGESIZE
    assert counts.intervals == 2 and 2 * pages <= counts._sums[2] < 2.5 * pages
    assert 0 < fault_seconds() < 1e-3 and fault_seconds() == fault_seconds()


def test_gain_is_measured():
    compute()
    counts = counted(lambda: compute(200))
    assert counts.share < faults.WORTH and not counts.advice("it")
    share = counted(fault).share
    assert share > 0.1
    [line] = counted(fault).advice("it")
    assert GAIN.match(line)[2] == "it"


def test_patch_with_verify_measures_the_gain():
    x = torch.randn(4, 8)
    [line] = lines(Allocates(SIZE), verify=x)
    percent, measured = GAIN.match(line).groups()
    assert 3 <= int(percent) <= 100 and measured == "this batch's forward and backward"
    assert not lines(Allocates(1), verify=x)


def test_patch_says_how_to_measure():
    report = patch(Large())
    assert str(report).count(HINT) == 1 and HINT not in report.summary
    assert str(report).splitlines()[-1].startswith(HINT)
    assert not lines(Allocates(1))
    assert not lines(Large().to("meta"))


def test_nothing_is_said_where_memory_is_kept(monkeypatch):
    monkeypatch.setattr(allocator, "_kept", True)
    assert not lines(Large())
    assert not lines(Allocates(SIZE), verify=torch.randn(4, 8))


@pytest.mark.parametrize("inside", [True, False])
def test_callback_names_the_gain_once(inside, caplog):
    pytest.importorskip("transformers")
    from fusedops.integrations.transformers.trainer import COUNTED, WARM_UP, FusedOpsCallback

    caplog.set_level(logging.INFO, "fusedops")
    model, state = Allocates(1), SimpleNamespace(is_world_process_zero=True)
    callback = FusedOpsCallback()
    callback.on_init_end(None, state, None, model=model)
    assert len(caplog.messages) == 1
    for number in range(2 * (WARM_UP + COUNTED)):
        if not inside:
            fault()  # such as an evaluation's
        callback.on_step_begin(None, state, None, model=model)
        (fault if inside else compute)()
        callback.on_step_end(None, state, None, model=model)
        expected = inside and number + 1 >= WARM_UP + COUNTED
        assert len(caplog.messages) == 1 + expected
    if inside:
        assert GAIN.match(caplog.messages[-1])[2] == "a training step"
        assert caplog.records[-1].levelno == logging.WARNING
