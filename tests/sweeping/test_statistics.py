"""fusedops.sweep's quantiles, knees and best rows, on samples and fake steps of known latency."""

import math
import random

import pytest
import torch

import fusedops
from fusedops.measuring import sampling
from fusedops.measuring.quantiles import median_interval, quantile
from fusedops.measuring.ratios import Ratio, expanded
from fusedops.sweeping import choice
from fusedops.sweeping.row import SweepRow
from tests.sweeping.machine import SLOWER, Machine, cost, tailed


def row(batch: int, throughput: float, **more) -> SweepRow:
    return SweepRow("eager", batch, None, p50=batch / throughput, throughput=throughput, **more)


@pytest.mark.parametrize(
    ("n", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (100, (40, 61))]
)
def test_the_interval_of_a_median_is_two_order_statistics(n, ranks):
    """The ranks of the sign test's 95 % interval (Conover, Practical Nonparametric Statistics)."""
    samples = [float(i) for i in range(1, n + 1)]
    random.Random(0).shuffle(samples)
    assert median_interval(samples) == ranks


@pytest.mark.parametrize(("n", "t"), [(6, 2.571), (12, 2.201), (60, 2.001)])
def test_an_interval_of_few_samples_is_widened_as_students(n, t):
    """t: Student's, of n - 1 degrees of freedom, instead of the normal distribution's 1.96."""
    power = t / 1.96 * math.sqrt(n / (n - 1))
    expected = 2.0, 2 * 0.5**power, 2 * 2**power
    assert expanded(Ratio(2.0, 1.0, 4.0), n) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("share", "needed"), [(0.95, 20), (0.99, 100)])
def test_tails_need_samples(share, needed):
    assert quantile([1.0] * (needed - 1), share) is None
    assert quantile([1.0] * needed, share) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_known_cost(seed, monkeypatch):
    """p50 and p95 within 10 %, the knee, and the best row under a budget."""
    machine = Machine()
    machine.install(monkeypatch)
    sweep = fusedops.sweep(
        lambda batch, length: torch.zeros(batch), step=tailed(machine, seed), past_knee=True
    )
    assert [row.batch for row in sweep.rows] == [1, 2, 4, 8, 16]
    for row in sweep.rows:
        assert row.samples == 100
        assert row.p50 == pytest.approx(cost(row.batch), rel=0.1)
        assert row.p95 == pytest.approx(SLOWER * cost(row.batch), rel=0.1)
        low, high = row.p50_interval
        assert low <= row.p50 <= high
        assert row.throughput == pytest.approx(row.batch / row.p50)
        assert row.seconds_per_sample == pytest.approx(row.p50 / row.batch)
    assert sweep.best(goal="knee").batch == 8
    assert sweep.best(goal="latency").batch == 1
    assert sweep.best(p95=1.1 * SLOWER * cost(4)).batch == 4
    assert sweep.best(p95=sweep.rows[2].p95).batch == 4
    with pytest.raises(
        ValueError, match=r"no row has a p95 of at most .*nearest is eager, batch 1"
    ):
        sweep.best(p95=0.5 * SLOWER * cost(1))


def test_a_curve_ends_after_its_knee(monkeypatch):
    machine = Machine()
    machine.install(monkeypatch)
    sweep = fusedops.sweep(
        lambda batch, length: torch.zeros(batch),
        step=tailed(machine, 0),
        batch=(1, 4, 8, 16, 32, 64),
    )
    reasons = {row.batch: row.skipped_reason for row in sweep.rows}
    assert reasons == dict.fromkeys((1, 4, 8, 16), "") | dict.fromkeys(
        (32, 64), "past the knee at batch 8"
    )


@pytest.mark.parametrize("sizes", [{"batch": (1, 4, 16)}, {"batch": 1, "length": (1, 4, 16)}])
def test_larger_points_get_more_of_the_budget(monkeypatch, sizes):
    """In proportion to the root of their size: 1, 2 and 4 parts of 7 here."""
    machine = Machine()
    machine.install(monkeypatch)
    monkeypatch.setattr(sampling, "MOST", 1000)

    def step(size: int) -> None:
        machine.seconds += size * 1e-3

    options = {"budget_s": 2, "past_knee": True, **sizes}
    sweep = fusedops.sweep(lambda batch, length: batch * (length or 1), step=step, **options)
    took = [row.samples * row.p50 for row in sweep.rows]
    assert took == pytest.approx([2 / 7, 4 / 7, 8 / 7], rel=0.1)


def test_disturbed_rounds_are_repeated_once(monkeypatch):
    """Every third run is disturbed at first: repeated, few are. All disturbed stays noisy."""
    machine = Machine()
    machine.install(monkeypatch)
    calls, quiet_after = [0], [100 + 3]

    def step(batch):
        calls[0] += 1
        busy = calls[0] % 3 == 0 and calls[0] <= quiet_after[0]
        machine.seconds += 0.010 + 0.005 * busy
        machine.elsewhere += 0.005 * busy

    sweep = fusedops.sweep(lambda batch, length: torch.zeros(batch), step=step, batch=4)
    (row,) = sweep.rows
    assert (row.noisy, row.samples) == (False, 100)
    assert row.p95 == pytest.approx(0.010)

    quiet_after[0] = 10**9
    sweep = fusedops.sweep(lambda batch, length: torch.zeros(batch), step=step, batch=4)
    assert sweep.rows[0].noisy
    assert "noisy" in sweep.table()


def test_best_says_why_there_is_none():
    grows = [row(1, 10.0), row(2, 19.0)]
    with pytest.raises(ValueError, match=r"no curve has a knee.*eager, batch 2"):
        choice.best(grows, None, "knee")
    with pytest.raises(ValueError, match="p95 needs rows of 20 samples"):
        choice.best(grows, 1.0, "throughput")
    with pytest.raises(ValueError, match="no row was measured"):
        choice.best(
            [SweepRow("eager", 1, None, skipped_reason="the budget is used up")], None, "knee"
        )
    with pytest.raises(ValueError, match="goal must be one of throughput, latency, knee, got 'x'"):
        choice.best(grows, None, "x")
    with pytest.raises(ValueError, match="p95 must be more than 0 seconds, got 0"):
        choice.best(grows, 0, "throughput")


@pytest.mark.parametrize(("is_noisy", "gain", "ends"), [
    (False, 1.09, True), (True, 1.09, False), (True, 0.7, True), (True, 1.3, False),
])  # fmt: skip
def test_noise_alone_is_no_knee(is_noisy, gain, ends):
    """With p50 known to 10 %, 9 % more throughput may be 33 % more."""

    def row(batch, rate):
        p50 = batch / rate
        return SweepRow(
            "eager", batch, None, p50=p50, p50_interval=(0.9 * p50, 1.1 * p50), throughput=rate,
            noisy=is_noisy,
        )  # fmt: skip

    assert choice.stops_growing(row(1, 10.0), row(2, 10.0 * gain)) is ends
