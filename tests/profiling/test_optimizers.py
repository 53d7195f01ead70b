"""The profiler times other AdamW implementations and predicts what each would save."""

import time
from collections import Counter
from dataclasses import replace
from time import perf_counter

import pytest
import torch
from torch import nn

from fusedops.optim import AdamW, AdamW8bit
from fusedops.profiling.advice.rules import advise
from fusedops.profiling.collect import optimizers
from fusedops.profiling.collect.optimizers import OTHERS, time_optimizers
from fusedops.profiling.evidence import Evidence, OptimizerTime
from fusedops.profiling.judge import judge
from profiling.cases import everything, same
from profiling.synthetic import MS, matmul, run, step


def trained(kind=torch.optim.AdamW, **options):
    """A model with 8 weights of 64 x 64 and 4 biases. Two biases never get a gradient."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=i < 4) for i in range(8)))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    optimizer = kind(model.parameters(), **options)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def timed(optimizer, seconds=30.0):
    return time_optimizers(optimizer, perf_counter() + seconds)


def test_steps_on_tensors_of_the_parameters_that_were_stepped():
    _, optimizer = trained(lr=0.125, weight_decay=0.5)
    groups, share = optimizers._stand_ins(optimizer, torch.Generator())
    (group,) = groups
    shapes = Counter(tuple(p.shape) for p in group["params"])
    assert shapes == {(64, 64): 7, (64,): 3} and share == 1
    assert group["lr"] == 0.125 and group["weight_decay"] == 0.5
    assert all(p.grad is not None and p.grad.any() for p in group["params"])
    assert not any(p is q for p in group["params"] for q in optimizer.state)


def test_a_part_stands_for_large_models(monkeypatch):
    _, optimizer = trained()
    monkeypatch.setattr(optimizers, "MOST", 8192)
    monkeypatch.setattr(optimizers, "LARGEST", 2048)
    groups, share = optimizers._stand_ins(optimizer, torch.Generator())
    elements = sum(p.numel() for p in groups[0]["params"])
    assert elements == 2 * 2048 + 64 and share == pytest.approx(elements / (7 * 4096 + 3 * 64))


def test_nothing_of_the_users_changes():
    model, optimizer = trained()
    before = everything(model, optimizer)
    times, reason = timed(optimizer)
    assert not reason and [row.name for row in times] == ["adamw8bit", "fused_adamw", "torch_fused"]
    assert same(before, everything(model, optimizer))


class Slow(torch.optim.SGD):
    """Steps in 3 ms."""

    def step(self, closure=None):
        time.sleep(3 * MS)


def test_the_other_optimizer_is_the_one_that_is_timed(monkeypatch):
    _, optimizer = trained()
    monkeypatch.setitem(OTHERS, "fused_adamw", lambda groups: Slow(groups[0]["params"]))
    times = {row.name: row for row in timed(optimizer)[0]}
    assert min(times["fused_adamw"].after) > 2.9 * MS > min(times["fused_adamw"].before)
    assert min(times["adamw8bit"].after) < 2.9 * MS


def test_which_optimizers_may_be_replaced():
    def names(*args, **options):
        return [row.name for row in timed(trained(*args, **options)[1])[0]]

    assert names(fused=True) == names(AdamW) == ["adamw8bit"]
    assert names(AdamW8bit) == names(torch.optim.SGD) == []
    assert timed(torch.optim.AdamW([torch.ones(2, requires_grad=True)])) == ((), "")
    assert timed(None) == ((), "")


def test_why_nothing_was_timed(monkeypatch):
    _, optimizer = trained()
    assert timed(optimizer, 0.0) == (None, "the budget had no time for it")
    monkeypatch.setitem(OTHERS, "adamw8bit", lambda groups: 1 / 0)
    times, reason = timed(optimizer)
    assert times is None and reason == "its step raised ZeroDivisionError: division by zero"


# The advice is a function of the evidence.

ABOUT = {"adamw_elements": 10**6, "adamw_bytes": 8 * 10**6, "parameter_bytes": 4 * 10**6}


def evidence(*times, optimizer=10 * MS, preempted=0.0, about=ABOUT):
    """A step of 40 ms, in which the optimizer takes 10 ms and other programs interrupt it."""
    cached = run(40 * MS, seed=1, preempted=preempted)
    seconds = () if optimizer is None else (optimizer,) * len(cached.seconds)
    cached = replace(cached, optimizer=seconds)
    return replace(step(matmul(40 * MS)), cached=cached, about=about, optimizers=times or None)


def predicted(evidence, name):
    (row,) = [row for row in advise(evidence, judge(evidence)) if row.id == name]
    return row.predicted


def other(name, before, after, share=1.0):
    """One of the pairs of blocks was disturbed."""
    return OptimizerTime(name, share, (before,) * 5 + (9.0,), (after,) * 6)


@pytest.mark.parametrize("name", ["adamw8bit", "fused_adamw"])
def test_a_saving_is_a_share_of_the_optimizers_time(name):
    case = evidence(other(name, 4 * MS, 1 * MS))
    assert predicted(case, name).seconds == pytest.approx(7.5 * MS, rel=0.01)
    interrupted = evidence(other(name, 4 * MS, 1 * MS), preempted=20 * MS)
    assert predicted(interrupted, name).seconds == pytest.approx(3.75 * MS, rel=0.05)


def test_an_optimizer_that_was_not_seen_takes_what_its_tensors_took():
    case = evidence(other("fused_adamw", 4 * MS, 1 * MS, share=0.5), optimizer=None)
    assert predicted(case, "fused_adamw").seconds == pytest.approx(6 * MS)


def test_an_optimizer_that_never_steps_saves_no_time():
    times = (other(name, 4 * MS, 1 * MS) for name in ("fused_adamw", "adamw8bit"))
    case = evidence(*times, optimizer=0.0)
    assert predicted(case, "adamw8bit").seconds is None
    assert "fused_adamw" not in {row.id for row in advise(case, judge(case))}


def test_an_optimizer_that_accumulates_gradients_counts_in_every_step():
    case = evidence(other("fused_adamw", 4 * MS, 1 * MS))
    steps = len(case.cached.seconds)
    every_fourth = tuple(40 * MS * (i % 4 == 0) for i in range(steps))
    case = replace(case, cached=replace(case.cached, optimizer=every_fourth))
    assert steps % 4 == 0
    assert predicted(case, "fused_adamw").seconds == pytest.approx(7.5 * MS, rel=0.01)


def test_torchs_fused_adamw_is_named_where_it_saves():
    fused = other("fused_adamw", 4 * MS, 1 * MS)
    for after, named in ((2 * MS, True), (5 * MS, False)):
        case = evidence(fused, other("torch_fused", 4 * MS, after))
        (tip,) = [tip for tip in advise(case, judge(case)) if tip.id == "fused_adamw"]
        assert ("fused=True" in tip.why) == named


def test_adamw8bit_saves_what_its_state_is_smaller():
    plain_step = evidence()
    assert predicted(plain_step, "adamw8bit").bytes == 5_970_000
    assert predicted(plain_step, "adamw8bit").seconds is None
    compact = evidence(about=ABOUT | {"adamw_bytes": 2_031_250})
    assert "adamw8bit" not in {row.id for row in advise(compact, judge(compact))}


def test_a_slower_optimizer_is_advised_for_its_bytes_only():
    case = evidence(other("adamw8bit", 4 * MS, 8 * MS), other("fused_adamw", 4 * MS, 8 * MS))
    assert predicted(case, "adamw8bit").seconds == pytest.approx(-10 * MS)
    assert "fused_adamw" not in {row.id for row in advise(case, judge(case))}


def test_saved_evidence_gives_the_same_advice(tmp_path):
    case = evidence(other("adamw8bit", 4 * MS, 1 * MS), other("torch_fused", 4 * MS, 2 * MS))
    case.save(tmp_path / "evidence.json")
    loaded = Evidence.load(tmp_path / "evidence.json")
    assert loaded == case
    assert advise(loaded, judge(loaded)) == advise(case, judge(case))
