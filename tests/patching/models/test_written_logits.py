"""Lazy logits that a forward writes to, or reads, before its cross entropy of them."""

import gc

import pytest
import torch
from axes import grid
from torch import nn
from torch.nn import functional as F

from fusedops.patching import patch
from fusedops.patching.models.loss import head as heads
from fusedops.patching.models.loss.logits import SCOPE, State
from patching.models.loss_cases import OTHERS
from patching.models.test_written_loss import CLASSES, IDS, LABELS, Plain, patched, results
from patching.quiet import quietly

pytestmark = pytest.mark.usefixtures("any_size")


def write_after_the_view(logits):
    rows = logits.view(-1, CLASSES)
    logits.mul_(2)
    return rows


def write_through_the_view(logits):
    logits.view(-1, CLASSES)[1:4] = 0
    return logits.view(-1, CLASSES)


def write_to_a_copy(logits):
    logits[:, :-1].contiguous().mul_(3)
    return logits.reshape(-1, CLASSES)


def write_to_a_copy_of_rows(logits):
    rows = logits[:, :-1].reshape(-1, CLASSES)
    rows.mul_(3)
    return torch.cat([rows, rows[:2]])


def detach_part(logits):
    return (logits.detach() + 0.5 * logits).view(-1, CLASSES)


def read_before(logits):
    assert logits.argmax(-1).shape == logits.shape[:-1]
    return logits.view(-1, CLASSES)


def some_classes(logits):
    return logits[..., :60].flatten(0, 1)


def add_a_parameter(logits):
    return (logits + nn.Parameter(torch.linspace(0, 1, CLASSES))).view(-1, CLASSES)


def add_after_a_scale(logits):
    return (2 * logits + torch.linspace(0, 9, CLASSES)).view(-1, CLASSES)


def every_other_class(logits):
    return logits[..., ::2].reshape(-1, 32).repeat(1, 2)


def later_classes(logits):
    return logits[..., 4:].reshape(-1, 60)


def add_before_fewer_classes(logits):
    return (logits + torch.linspace(0, 9, CLASSES))[..., :60].reshape(-1, 60)


def add_what_steps_before_the_loss(logits):
    row = nn.Parameter(torch.linspace(0, 9, CLASSES))
    logits = logits + row
    with torch.no_grad():
        row.zero_()
    return logits.view(-1, CLASSES)


def add_twice(logits):
    logits = logits + torch.linspace(0, 9, CLASSES) + torch.linspace(3, 0, CLASSES)
    return (logits * 0.5).view(-1, CLASSES)


def add_then_write_what_was_added(logits):
    row = torch.linspace(0, 9, CLASSES)
    logits = logits + row
    row.zero_()
    return logits.view(-1, CLASSES)


WRITES = {
    f.__name__: f
    for f in (
        *(write_after_the_view, write_through_the_view, write_to_a_copy, write_to_a_copy_of_rows),
        *(detach_part, read_before, some_classes, every_other_class, later_classes),
        *(add_before_fewer_classes, add_what_steps_before_the_loss),
        *(add_a_parameter, add_after_a_scale, add_twice, add_then_write_what_was_added),
    )
}


class Written(Plain):
    change = ""

    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids)))
        logits = self.changed(logits)
        return logits, F.cross_entropy(logits, targets.view(-1), ignore_index=-1)

    def changed(self, logits):
        return WRITES[self.change](logits)


@grid(name=WRITES, bias=[False, True])
def test_logits_that_the_forward_changes(name, bias):
    """patch cannot read such a loss, but if it took it for one of a head, it would be right."""
    model = Written(bias)
    model.change = name
    call = IDS[0], LABELS[0].clamp(max=59)
    expected = [results(model, *call), model(*call)[0]]
    assert not quietly(patch, model, **OTHERS).fused
    patched(as_a_head := Plain(bias))  # a head that waits
    model.head = as_a_head.head
    before, later = SCOPE.set((model.head,)), heads.LATER.set(True)
    try:
        actual = [results(model, *call), model(*call)[0]]
    finally:
        SCOPE.reset(before)
        heads.LATER.reset(later)
    actual[1] = actual[1] + 0  # read
    torch.testing.assert_close(actual, expected)


def test_many_steps_leave_nothing_behind():
    model, bad = patched(Plain()), torch.full_like(LABELS[0], CLASSES)

    def step():
        results(model, IDS[0], LABELS[0], lazy=True)
        with pytest.raises(IndexError):
            model(IDS[0], bad)

    def count():
        gc.collect()
        return sum(isinstance(x, torch.Tensor | State) for x in gc.get_objects())

    for _ in range(10):
        step()
    before = count()
    for _ in range(100):
        step()
    assert count() <= before


def test_a_loss_outside_of_the_forward_reads_the_logits():
    logits, _ = patched(Plain())(IDS[0], LABELS[0])
    F.cross_entropy(logits.flatten(0, 1), LABELS[0].flatten(), ignore_index=-1)
    assert logits.state.has_values
