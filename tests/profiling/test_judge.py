"""`judge` names what limits a step (input, launches, memory, ...) from synthetic measurements."""

import functools
import itertools
import json
from dataclasses import replace

import pytest

from fusedops.profiling.evidence import Evidence, Loader, Sync
from fusedops.profiling.judge import THRESHOLDS, judge
from fusedops.profiling.shares import BOUNDS, raised
from profiling.synthetic import (
    CEILINGS,
    MS,
    gather,
    gpu_step,
    matmul,
    op,
    run,
    step,
    stream,
    tiny,
)

CASES = {
    "slow loader": (step(matmul(10 * MS), wait=30 * MS), "input", 0.75),
    "contention": (step(matmul(10 * MS), contention=15 * MS), "input", 0.6),
    "small operators": (step(tiny(6 * MS), python=2 * MS, elasticity=0.05), "launch", 1.0),
    "Python": (step(tiny(1 * MS), python=9 * MS, elasticity=0.0), "launch", 1.0),
    "bandwidth": (step(stream(20 * MS), elasticity=1.0), "memory", 0.9),
    "products": (step(matmul(20 * MS), elasticity=1.0), "compute", 0.9),
    "gather": (step(gather(20 * MS), elasticity=1.0), "kernels", 0.95),
    "page faults": (
        step(
            stream(20 * MS, 0.3),
            cached=run(20 * MS, seed=1, user=0.2, system=0.2, faults=400_000),
        ),
        "allocation",
        0.5,
    ),
    "too many threads": (
        step(matmul(20 * MS), fewer_threads=run(8 * MS, seed=3), threads=8),
        "threads",
        0.6,
    ),
    "quota": (
        step(matmul(20 * MS), cached=run(20 * MS, seed=1, stopped=12 * MS, throttled=0.24)),
        "threads",
        0.6,
    ),
    "collectives": (
        step(matmul(20 * MS), communication=12 * MS, processes=8),
        "communication",
        0.6,
    ),
    "busy GPU": (gpu_step(ops=[matmul(9 * MS)]), "compute", 0.81),
    "GPU bandwidth": (gpu_step(ops=[stream(9 * MS)]), "memory", 0.81),
    "slow GPU kernels": (gpu_step(ops=[gather(9 * MS)]), "kernels", 0.855),
    "GPU launches": (gpu_step(busy=0.4, host_waits=0.0, median_kernel=4e-6), "launch", 0.6),
    "GPU syncs": (
        gpu_step(busy=0.6, syncs=(Sync("train.py:12", 3 * MS),)),
        "sync",
        0.3,
    ),
    "GPU collectives": (
        gpu_step(busy=0.7, exposed_communication=2.5 * MS),
        "communication",
        0.25,
    ),
    "cudaMalloc": (gpu_step(busy=0.6, mallocs=40, malloc_seconds=3 * MS), "allocation", 0.3),
    "GPU input": (gpu_step(busy=0.2, wait=20 * MS), "input", 2 / 3),
}

CONTROLS = {
    "slow loader": step(matmul(10 * MS), wait=0.1 * MS),
    "contention": step(matmul(10 * MS)),
    "small operators": step(matmul(8 * MS), python=2 * MS, elasticity=0.9),
    "Python": step(matmul(9 * MS), tiny(1 * MS), elasticity=0.9),
    "bandwidth": step(op(seconds=20 * MS, calls=8000, size=2**24, distance=2**17), elasticity=0.1),
    "products": step(tiny(20 * MS), elasticity=0.1),
    "gather": step(stream(20 * MS), elasticity=1.0),
    "page faults": step(stream(20 * MS), cached=run(20 * MS, seed=1, user=0.4, faults=100)),
    "too many threads": step(matmul(20 * MS), fewer_threads=run(20 * MS, seed=3), threads=8),
    "quota": step(matmul(20 * MS)),
    "collectives": step(matmul(20 * MS), communication=1 * MS, processes=8),
    "busy GPU": gpu_step(busy=0.3, host_waits=0.0, median_kernel=4e-6, ops=[matmul(3 * MS)]),
    "GPU bandwidth": gpu_step(ops=[matmul(9 * MS)]),
    "slow GPU kernels": gpu_step(ops=[matmul(9 * MS)]),
    "GPU launches": gpu_step(busy=0.95),
    "GPU syncs": gpu_step(busy=0.95, syncs=(Sync("train.py:12", 0.1 * MS),)),
    "GPU collectives": gpu_step(busy=0.95, exposed_communication=0.2 * MS),
    "cudaMalloc": gpu_step(busy=0.95, mallocs=1, malloc_seconds=0.1 * MS),
    "GPU input": gpu_step(busy=0.9, wait=0.1 * MS),
}


@functools.cache
def verdict_of(case, control=False):
    return judge(CONTROLS[case] if control else CASES[case][0])


@pytest.mark.parametrize("case", CASES)
def test_every_bound(case):
    _, bound, share = CASES[case]
    verdict = verdict_of(case)
    assert verdict.bounds == (bound,), verdict
    assert verdict.bound == bound and verdict.share == verdict.shares[bound]
    low, middle, high = verdict.share
    assert low <= middle <= high and middle == pytest.approx(share, abs=0.05)
    assert any(character.isdigit() for line in verdict.evidence for character in line)


@pytest.mark.parametrize("case", CASES)
def test_controls_lose_the_verdict(case):
    bound = CASES[case][1]
    verdict = verdict_of(case, control=True)
    assert bound not in verdict.bounds
    assert verdict.shares[bound][1] < THRESHOLDS[bound]


def test_shares_sum_to_one():
    for case, control in itertools.product(CASES, (False, True)):
        shares = verdict_of(case, control).shares
        assert set(shares) == set(BOUNDS)
        assert sum(middle for _, middle, _ in shares.values()) == pytest.approx(1, abs=1e-6)
        assert all(middle >= -1e-9 for _, middle, _ in shares.values())


def test_page_faults_are_taken_off_the_operators_once():
    shares = verdict_of("page faults").shares
    assert shares["kernels"][1] + shares["memory"][1] == pytest.approx(0.5, abs=0.01)


def test_saved_evidence_gives_the_same_verdict():
    for case, (evidence, *_) in CASES.items():
        loaded = Evidence.from_dict(json.loads(json.dumps(evidence.to_dict())))
        assert loaded == evidence and judge(loaded) == verdict_of(case)


PAIRS = {
    "slow loader, small operators": (
        step(tiny(8 * MS), python=2 * MS, wait=9.6 * MS, elasticity=0.05),
        {"input", "launch"},
    ),
    "products, bandwidth": (
        step(matmul(10.4 * MS, 1.0), stream(9 * MS, 1.0), elasticity=1.0),
        {"compute", "memory"},
    ),
    "slow loader, page faults": (
        step(
            stream(20 * MS, 0.3),
            wait=10 * MS,
            cached=run(20 * MS, seed=1, user=0.2, system=0.2, faults=400_000),
        ),
        {"input", "allocation"},
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_bounds_within_ten_points_are_both_named(pair):
    evidence, bounds = PAIRS[pair]
    assert set(judge(evidence).bounds) == bounds


def test_a_long_wait_is_named_beside_a_larger_bound():
    """A wait of a third of the step is named; one of a sixth only limits what is left."""
    assert judge(step(matmul(60 * MS, 1.0), wait=30 * MS)).bounds == ("compute", "input")
    short = judge(step(matmul(60 * MS, 1.0), wait=12 * MS))
    assert short.bounds == ("compute",) and short.next_bounds == ("input",)


def test_a_second_bound_further_away_is_next():
    verdict = judge(step(matmul(10 * MS, 1.0), wait=30 * MS, elasticity=1.0))
    assert verdict.bounds == ("input",) and verdict.next_bounds == ("compute",)
    verdict = judge(step(stream(10 * MS, 1.0), wait=13.2 * MS))  # 57 and 43 %, both could be named
    assert verdict.shares["memory"][0] > THRESHOLDS["memory"]
    assert verdict.bounds == ("input",) and verdict.next_bounds == ("memory",)


def test_a_balanced_step_has_no_single_bound():
    ops = (matmul(6 * MS), stream(6 * MS), gather(6 * MS))
    verdict = judge(step(*ops, tiny(2 * MS), elasticity=0.6))
    assert verdict.bounds == ("unknown",)
    assert any("no single bound" in line for line in verdict.evidence)


def test_a_loops_largest_share_is_named_below_its_threshold_too():
    """46 % compute reach no threshold, 44 % slow kernels do."""
    evidence = step(matmul(46 * MS, 1.0), gather(44 * MS), stream(10 * MS))
    assert judge(evidence).bounds == ("kernels",)
    assert judge(replace(evidence, recorded=True)).bounds == ("compute", "kernels")


def test_half_the_batch_contradicts_launch_and_compute():
    small = judge(step(tiny(10 * MS), elasticity=1.0))
    assert small.bounds == ("unknown",)
    assert any("not launch" in line for line in small.evidence)
    products = judge(step(matmul(10 * MS), elasticity=0.1))
    assert products.bounds == ("unknown",)
    assert any("not compute" in line for line in products.evidence)


def test_noise_does_not_contradict():
    """Half the batch was measured so badly that it says nothing."""
    for operator, bound in ((matmul, "compute"), (tiny, "launch")):
        noisy = replace(step(operator(10 * MS)), half=run(8 * MS, jitter=0.9, seed=5))
        assert judge(noisy).bounds == (bound,)


def test_other_programs_do_not_change_the_verdict():
    """They take two thirds of the step's time from the thread."""
    slowed = run(30 * MS, stopped=20 * MS, preempted=20 * MS)
    verdict = judge(replace(step(matmul(10 * MS)), plain=slowed, cached=slowed))
    assert verdict.bounds == ("compute",) and verdict.shares["unknown"][1] < 0.02


def test_a_wait_is_a_share_of_the_time_that_other_programs_leave():
    """Of 50 ms, others have the CPU for 20 and the batch takes 6: a fifth of what is left."""
    held_up = run(44 * MS, wait=6 * MS, preempted=20 * MS)
    evidence = step(matmul(24 * MS, 1.0), plain=held_up, cached=None)
    assert judge(evidence).shares["input"][1] == pytest.approx(0.2, rel=0.05)


def test_workers_that_preempt_the_step_are_input():
    slowed = run(30 * MS, stopped=20 * MS, preempted=20 * MS, paired=False)
    alone = run(10 * MS, seed=1, paired=False)
    with_workers = Loader(workers=2, asynchronous=True)
    verdict = judge(step(matmul(10 * MS), plain=slowed, cached=alone, loader=with_workers))
    assert verdict.bounds == ("input",)
    assert verdict.shares["input"][1] == pytest.approx(2 / 3, abs=0.02)


def test_a_step_that_waits_is_unexplained():
    """For half of the time its thread sleeps, and no counter says why."""
    slowed = run(20 * MS, jitter=0.5, stopped=10 * MS, user=0.2)
    again = run(20 * MS, jitter=0.5, stopped=10 * MS, user=0.2, seed=1)
    verdict = judge(replace(step(matmul(10 * MS)), plain=slowed, cached=again))
    assert verdict.bounds == ("unknown",)
    assert any("unexplained" in line for line in verdict.evidence)
    assert any("vary by" in line for line in verdict.evidence)


def test_few_steps_give_no_verdict():
    short = step(matmul(10 * MS), wait=30 * MS, plain=run(10 * MS, 30 * MS, steps=4))
    verdict = judge(short)
    assert verdict.bounds == ("unknown",)
    assert "a verdict needs 5 steps, 4 were measured" in verdict.evidence


def test_no_step_is_an_error():
    with pytest.raises(ValueError, match="at least one step, got none"):
        judge(Evidence(plain=run(1.0, steps=0)))


def test_a_threshold_counts_at_the_lower_end_of_the_interval():
    """20 % of input in more than half of the rounds, and none in the others."""
    kept = run(10 * MS, jitter=0.0)
    for slow, bound in ((20, "input"), (11, "unknown")):
        seconds = (12.5 * MS,) * slow + (10 * MS,) * (20 - slow)
        verdict = judge(Evidence(plain=replace(kept, seconds=seconds), cached=kept))
        assert verdict.shares["input"][1] == pytest.approx(0.2)
        assert (verdict.shares["input"][0] < THRESHOLDS["input"]) == (bound == "unknown")
        assert verdict.bounds == (bound,)


def test_without_operators_a_step_is_unexplained():
    verdict = judge(Evidence(plain=run(10 * MS), cached=run(10 * MS)))
    assert verdict.bounds == ("unknown",) and verdict.shares["unknown"][1] > 0.9


def test_without_the_experiment_the_wait_counts_as_input():
    assert judge(Evidence(plain=run(10 * MS, wait=10 * MS))).bounds == ("input",)


def test_the_profilers_cost_is_taken_off():
    """A step of 5000 small calls that the profiler makes 1.5 times as long."""
    evidence = step(tiny(10 * MS), matmul(10 * MS, 1.0))
    shares = judge(evidence).shares
    assert shares["launch"][1] == pytest.approx(0.5, abs=0.02)
    assert shares["compute"][1] == pytest.approx(0.5, abs=0.02)


def test_other_versions_are_refused():
    values = json.loads(json.dumps(step(matmul(MS)).to_dict()))
    with pytest.raises(ValueError, match="must have version 1, got 2"):
        Evidence.from_dict(values | {"version": 2})
    with pytest.raises(ValueError, match="Evidence has no field speed"):
        Evidence.from_dict(values | {"speed": 3})


def test_a_bandwidth_ceiling_is_that_of_the_reuse_distance():
    """The same traffic is fast from the cache, so a slow operator there is a slow kernel."""
    near = step(op(seconds=20 * MS, size=2**27, distance=2**17))
    far = step(op(seconds=20 * MS, size=2**27, distance=2**27))
    assert judge(near).bounds == ("kernels",) and judge(far).bounds == ("memory",)
    assert CEILINGS.copy[0][1] > CEILINGS.copy[-1][1]


def test_interrupted_operators_are_not_slow_kernels():
    """Under the profiler other programs had the CPU in two thirds of every long call."""
    quiet = step(matmul(10 * MS), tiny(2 * MS), elasticity=1.0)
    profiled = quiet.profiled
    product, small = profiled.ops
    slowed = replace(product, seconds=tuple(s + 20 * MS for s in product.seconds))
    walls = tuple(s + 20 * MS for s in profiled.seconds)
    noisy = replace(profiled, seconds=walls, ops=(slowed, small), preempted=(20 * MS,) * 3)
    verdict = judge(replace(quiet, profiled=noisy))
    assert verdict.bounds == ("compute",)
    for bound in BOUNDS:
        assert verdict.shares[bound][1] == pytest.approx(judge(quiet).shares[bound][1], abs=0.01)
    alone = replace(noisy, preempted=(0.0,) * 3)  # the same times, and a step takes them as well
    slow = replace(quiet, profiled=alone, cached=run(32 * MS), half=None)
    assert judge(slow).bounds == ("kernels",)


def test_batches_of_other_lengths_are_no_noise():
    """The same batch takes as long again, though batches differ by half of their time."""
    lengths = run(30 * MS, jitter=0.5)
    ops = matmul(10 * MS), stream(10 * MS), gather(6 * MS)
    even = step(*ops, python=4 * MS, plain=lengths, cached=lengths)
    for evidence, noisy in ((even, False), (replace(even, cached=None), True)):
        verdict = judge(evidence)
        assert verdict.bounds == ("unknown",)
        assert any("vary by" in line for line in verdict.evidence) == noisy


@pytest.mark.parametrize(
    "times, seconds, raises",
    [
        (1.2, 20 * MS, True),
        (0.8, 20 * MS, False),
        (3.0, 20 * MS, False),  # its calls or its time are wrong
        (1.2, 0.5 * MS, False),  # too short to be timed well
    ],
)
def test_a_step_that_is_faster_than_a_ceiling_raises_it(times, seconds, raises):
    peak = CEILINGS.flops["float32"]
    fast = op("aten::mm", seconds, flops=round(times * peak * seconds))
    peaks = raised(step(fast, op("aten::add", seconds)))
    assert peaks.flops["float32"] == pytest.approx(times * peak if raises else peak, rel=0.01)
    assert peaks.flops["bfloat16"] == CEILINGS.flops["bfloat16"] and peaks.copy == CEILINGS.copy
