"""Tests of fusedops.testing: the accuracy check `yardstick`, poisoned memory, moved tensors."""

import pytest
import torch

from fusedops.testing import placed, poisoned, yardstick

EXACT = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).double()
EAGER = EXACT.float() * (1 + 1e-7)
INF = torch.inf


def changed(t, value, at=(1, 7)):
    t = t.clone()
    t[at] = value
    return t


def test_what_errs_as_eager_does_passes():
    assert yardstick(EAGER, EAGER, EXACT) is None
    assert yardstick(EXACT.float(), EAGER, EXACT) is None


def test_one_wrong_element_is_seen():
    assert "max norm" in yardstick(changed(EAGER, EAGER[1, 7] + 1e-4), EAGER, EXACT)


def test_one_wrong_row_is_seen():
    exact = EXACT.clone()
    exact[2] *= 1e-3  # the norm over the whole tensor does not see it
    eager, wrong = (exact.float() * (1 + 1e-7) for _ in range(2))
    wrong[2] *= 1 + 1e-6
    assert "1 of 4 rows" in yardstick(wrong, eager, exact)


def test_nan_and_infinity_are_seen():
    for value in (torch.nan, INF, -INF):
        assert yardstick(changed(EAGER, value), EAGER, EXACT)
        assert yardstick(EAGER, changed(EAGER, value), changed(EXACT, value))
        assert (
            yardstick(changed(EAGER, value), changed(EAGER, value), changed(EXACT, value)) is None
        )
    assert yardstick(changed(EAGER, -INF), changed(EAGER, INF), changed(EXACT, INF))


def test_overflow_where_eager_overflows_passes():
    assert yardstick(changed(EAGER, INF), changed(EAGER, INF), changed(EXACT, 1e39)) is None


def test_an_infinity_hides_nothing_else_in_its_row():
    infinite = [changed(t, INF) for t in (EAGER, EAGER, EXACT)]
    infinite[0][1, 8] += 1e-4
    assert "max norm" in yardstick(*infinite)


def test_poison_is_seen():
    with poisoned():
        assert torch.empty(100).isnan().all()


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[1:, 3:7], lambda t: t[:, ::2], lambda t: t[:1].expand(8, 12)],
    ids=["transposed", "slice", "every second column", "expanded"],
)
def test_a_placed_tensor_keeps_its_layout(view):
    there = view(torch.randn(8, 12))
    moved, number = placed((there, 3), torch.device("meta"))
    assert moved.is_meta and number == 3
    assert (moved.shape, moved.stride()) == (there.shape, there.stride())
    assert moved.storage_offset() == there.storage_offset()


def test_a_tensor_in_its_place_stays():
    x = torch.randn(3, 4).t()
    assert placed((x,), torch.device("cpu"))[0] is x
