"""The profiler's predictions for patch, bf16 and AdamW, from timed calls to the advice."""

import inspect
import json
import time
import warnings
from collections import Counter
from dataclasses import replace
from time import perf_counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.measuring.changes import ONLY_LOSS
from fusedops.optim import AdamW, AdamW8bit
from fusedops.patching.core.swap import fused_modules
from fusedops.profiling.advice.rules import advise
from fusedops.profiling.collect import autocast, experiments, optimizers
from fusedops.profiling.collect.autocast import time_autocast
from fusedops.profiling.collect.optimizers import OTHERS, time_optimizers
from fusedops.profiling.collect.sites import time_sites
from fusedops.profiling.evidence import Autocast, Evidence, OptimizerTime, Patching, SiteTime
from fusedops.profiling.judge import judge
from profiling.cases import everything, same
from profiling.synthetic import CEILINGS, MS, matmul, run, step

LAYERS, BATCH, LENGTH, WIDE, HEADS = 2, 2, 16, 96, 4
SIZES = {"hidden_size": 64, "intermediate_size": WIDE, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": 2, "vocab_size": 128}


def llama(**more):
    config = transformers.LlamaConfig(**SIZES | more)
    return transformers.LlamaForCausalLM(config), torch.randint(128, (BATCH, LENGTH))


def time_patched(model, call, seconds=0.0):
    """The times of a model's sites; few rounds by default, which is enough for what is counted."""
    times, reason = time_sites(model, call, perf_counter() + seconds)
    assert not reason and not fused_modules(model)
    return times


def time_in_autocast(call):
    """On a busy machine a slow moment can make a call's share too small to count: all count."""
    with mock.patch.object(autocast, "MATTER", 1.1):
        times, reason = time_autocast(call, perf_counter())
    assert not reason
    return times


def calls(times):
    counts = Counter()
    for call in times.timed:
        counts[call.kind] += call.calls
    return counts


def size_of(times, kind):
    return sum(call.bytes for call in times.timed if call.kind == kind)


def tips(evidence, name):
    return [tip for tip in advise(evidence, judge(evidence)) if tip.id == name]


def predicted(evidence, name):
    (tip,) = tips(evidence, name)
    return tip.predicted


# patch: each site's call is timed fused and as it is.


def test_all_calls_of_a_step_are_timed_as_counts_sees_them(any_size):
    model, ids = llama()
    times = time_patched(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    kernels = Counter()
    with fusedops.patched(model) as report:
        counts = report.counts({"input_ids": ids, "labels": ids})
        assert times.sites == {kind: n for kind, (n, _) in report.coverage.items()}
    for site in counts.sites:
        kernels[site.kind] += site.kernel
    assert calls(times) == +kernels and times.left == 0


def test_calls_that_would_run_torchs_code_are_left_out():
    model, ids = llama()
    times = time_patched(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert times.left == LAYERS and "attention" not in calls(times)


def once(model, ids):
    model(input_ids=ids, labels=ids).loss.backward()


def accumulated(model, ids):
    once(model, ids)
    once(model, ids)


def before_one_backward(model, ids):
    sum(model(ids, labels=ids).loss for _ in range(2)).backward()


def without_gradients(model, ids):
    with torch.no_grad():
        model(input_ids=ids)


def checkpointing(reentrant):
    def prepared(model, ids):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the name is deprecated
            model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        once(model, ids)

    return prepared


@pytest.mark.parametrize(
    ("training", "runs", "kept"),
    [
        (once, 1, 1),
        (accumulated, 2, 1),
        (before_one_backward, 2, 2),
        (without_gradients, 1, 0),
        (checkpointing(reentrant=False), 2, 0),
        (checkpointing(reentrant=True), 2, 0),
    ],
    ids=["once", "accumulated", "two forwards", "no gradients", "checkpointed", "reentrant"],
)
def test_a_gated_product_no_longer_keeps_its_activation(training, runs, kept, any_size):
    model, ids = llama()
    times = time_patched(model, lambda: training(model, ids))
    assert calls(times)["mlp"] == runs * LAYERS
    assert size_of(times, "mlp") == kept * LAYERS * BATCH * LENGTH * WIDE * 4


def test_attention_keeps_no_scores_and_the_loss_no_logits(any_size):
    """transformers' eager function keeps the mask's sum, the probabilities and repeated keys."""
    model, ids = llama(attn_implementation="eager", vocab_size=1024)
    times = time_patched(model, lambda: once(model, ids))
    assert size_of(times, "attention") >= LAYERS * BATCH * HEADS * LENGTH**2 * 4
    times = time_patched(model, lambda: once(model, ids.repeat(1, 16)))
    assert size_of(times, "loss") >= 16 * ids.numel() * 1024 * 4


def test_a_site_in_autocast_is_repeated_in_autocast():
    seen = []

    class Spy(nn.LayerNorm):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    model = nn.Sequential(Spy(8))

    def call():
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 8))

    time_patched(model, call)
    assert len(seen) > 2 and all(seen)


class SlowNorm(nn.LayerNorm):
    """A layer norm whose call takes 3 ms more than it needs."""

    def forward(self, x):
        time.sleep(3 * MS)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def test_a_saving_is_calls_times_the_difference():
    model = nn.Sequential(*(SlowNorm(64) for _ in range(3)))
    x = torch.randn(8, 64, requires_grad=True)
    times = time_patched(model, lambda: model(x).sum().backward(), seconds=20.0)
    (call,) = times.timed
    assert (call.kind, call.name, call.shapes, call.calls) == ("norm", "SlowNorm", "[8, 64]", 3)
    seconds = predicted(replace(step(matmul(40 * MS)), patching=times), "patch").seconds
    assert 8 * MS < seconds < 18 * MS  # a busy machine wakes a sleeper late


def patching(*timed, left=0):
    return replace(step(matmul(40 * MS)), patching=Patching({"norm": 9, "loss": 1}, timed, left))


def call_time(kind, calls, before, after, size=0):
    """One of the pairs of blocks was disturbed."""
    return SiteTime(kind, kind, "[8, 8]", calls, (before,) * 5 + (9.0,), (after,) * 6, size)


def test_patch_sums_over_calls_by_kind():
    evidence = patching(
        call_time("norm", 4, 3 * MS, 1 * MS, 2**20),
        call_time("norm", 2, 1 * MS, 2 * MS, -(2**19)),
        call_time("loss", 1, 9 * MS, 1 * MS, 2**22),
        left=3,
    )
    (tip,) = tips(evidence, "patch")
    assert tip.predicted.seconds == pytest.approx(14 * MS)
    assert tip.predicted.bytes == 2**22 + 2**19 and "b l V" in tip.formula
    assert "it would fuse 9 norm, 1 loss sites: loss -8 ms, -4 MiB; norm -6 ms, -512 KiB" in tip.why
    assert tip.why.endswith("3 calls would run torch's code as before")


def test_a_slower_patch_is_predicted_and_comes_last():
    evidence = patching(call_time("norm", 2, 1 * MS, 2 * MS))
    tip = advise(evidence, judge(evidence))[-1]
    assert tip.id == "patch" and tip.predicted.seconds == pytest.approx(-2 * MS)


def test_without_times_patch_has_no_prediction():
    (tip,) = tips(patching(), "patch")
    assert tip.predicted is None and tip.why == "it would fuse 9 norm, 1 loss sites"
    assert predicted(patching(left=5), "patch").seconds == 0
    assert tips(step(matmul(40 * MS)), "patch") == []


def test_the_advice_for_the_loss_alone_leaves_every_other_kind():
    options = inspect.signature(fusedops.patch).parameters.values()
    kinds = {option.name for option in options if option.default is True}
    assert dict.fromkeys(kinds - {"loss"}, False) == ONLY_LOSS


# bf16: each function's call is timed with and without autocast.


class Chain(nn.Module):
    """Linears with a layer norm before and an activation between them."""

    def __init__(self, width=64, linears=3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(linears))

    def forward(self, x):
        x = self.norm(x)
        for linear in self.linears:
            x = F.gelu(linear(x))
        return x


def test_calls_whose_dtypes_change_are_timed():
    """The first linear gets a float32 input, the others what a linear in bfloat16 gave."""
    model, x = Chain(), torch.randn(32, 64)
    times = time_in_autocast(lambda: model(x).sum().backward())
    counts = sorted(call.calls for call in times.timed if call.kind == "linear")
    assert counts == [1, 2] and calls(times)["gelu"] == 3 and times.left == 0
    assert "layer_norm" not in calls(times)


def test_steps_that_differ_in_autocast_are_left_out():
    model, x = Chain(), torch.randn(32, 64)

    def call():
        model(x[:16] if torch.is_autocast_enabled("cpu") else x).sum().backward()

    times = time_in_autocast(call)
    assert times.left >= 6 and not {"linear", "gelu"} & set(calls(times))


def test_a_patched_models_sites_are_calls_of_autocast_too():
    model, x = Chain(width=512), torch.randn(256, 512)
    with fusedops.patched(model):
        times = time_in_autocast(lambda: model(x).sum().backward())
    assert calls(times)["linear"] == 3 and calls(times)["norm"] == 1


class Products(TorchDispatchMode):
    """Counts products by dtype, and casts by shape and dtype."""

    def __init__(self):
        super().__init__()
        self.products, self.casts = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.products[out.dtype] += 1
        if func is torch.ops.aten._to_copy.default and out.shape == (64, 64):
            self.casts[out.dtype] += 1
        return out


def test_a_call_in_autocast_casts_its_weight_and_its_gradient():
    """As in the step itself: without the casts, small products would seem to gain too much."""
    model, x = Chain(linears=1), torch.randn(32, 64)
    with Products() as seen:
        time_in_autocast(lambda: model(x).sum().backward())
    in_autocast = seen.products[torch.bfloat16] // 3  # forward, and two products backward
    assert in_autocast > 4 and seen.products[torch.float32] > 3 * 4
    assert seen.casts == {torch.bfloat16: in_autocast, torch.float32: in_autocast}


class SlowInBfloat16(TorchDispatchMode):
    """A gelu in bfloat16 takes 30 ms longer."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.gelu.default and args[0].dtype == torch.bfloat16:
            end = time.thread_time() + 30 * MS
            while time.thread_time() < end:
                pass
        return func(*args, **(kwargs or {}))


def test_what_is_slower_in_autocast_is_not_advised():
    model, x = Chain(), torch.randn(32, 64)
    with SlowInBfloat16():
        times = time_in_autocast(lambda: model(x).sum().backward())
    (gelu,) = [entry for entry in times.timed if entry.kind == "gelu"]
    assert 29 * MS < min(gelu.after) - min(gelu.before) < 90 * MS and gelu.calls == 3
    assert not tips(replace(step(matmul(40 * MS)), autocast=Autocast((gelu,))), "bf16")


@pytest.mark.parametrize("forwards", [1, 2])
def test_bytes_kept_in_autocast_are_those_of_one_forward(forwards):
    """The input's cast, the sum before gelu, its result, and a copy of a weight."""
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
    inputs = [torch.randn(4, 16) for _ in range(forwards)]
    times = time_in_autocast(lambda: [model(x).sum().backward() for x in inputs])
    assert times.kept == (4 * (16 + 32 + 32) * 4, (4 * (16 + 32 + 32) + 8 * 32) * 2)


def test_bf16_sums_over_calls():
    """A function that is slower in bfloat16 takes off what the products save."""
    times = call_time("linear", 4, 3 * MS, 1 * MS), call_time("softmax", 2, 1 * MS, 2 * MS)
    evidence = replace(step(matmul(40 * MS)), autocast=Autocast(times, (2**22, 2**21), left=3))
    (tip,) = tips(evidence, "bf16")
    assert tip.predicted.seconds == pytest.approx(6 * MS) and tip.predicted.bytes == 2**21
    assert "In autocast: linear -8 ms, softmax +2 ms" in tip.why and "casts" in tip.formula
    assert tip.why.endswith("softmax +2 ms; 3 calls were not compared")


def test_without_times_bf16_is_predicted_from_the_peaks():
    """Of the time at float32's peak, what bfloat16's saves, less the casts' bytes and calls."""
    evidence = step(matmul(40 * MS))
    (op,), ceilings = evidence.profiled.ops, evidence.ceilings
    seconds = op.flops / ceilings.flops["float32"] - op.flops / ceilings.flops["bfloat16"]
    seconds -= op.bytes / ceilings.copy[-1][1] + 3 * op.calls * ceilings.op_seconds
    assert predicted(evidence, "bf16").seconds == pytest.approx(seconds)
    slow = replace(ceilings, flops={"float32": 100e9, "bfloat16": 90e9})
    assert tips(replace(evidence, ceilings=slow), "bf16") == []


# AdamW: other implementations step on tensors like the user's.


def trained(kind=torch.optim.AdamW, **options):
    """An optimizer of 8 weights of 64 x 64 and 4 biases. A weight and a bias get no gradient."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=i < 4) for i in range(8)))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    optimizer = kind(model.parameters(), **options)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    return optimizer


def time_others(optimizer):
    times, reason = time_optimizers(optimizer, perf_counter() + 30.0)
    assert not reason
    return {row.name: row for row in times}


class SlowSGD(torch.optim.SGD):
    """Steps in 3 ms, and keeps its arguments."""

    def step(self, closure=None):
        time.sleep(3 * MS)


def test_the_other_optimizer_is_the_one_that_is_timed(monkeypatch):
    """With the user's options, on tensors of the parameters that were stepped."""
    groups = []
    monkeypatch.setitem(
        OTHERS, "fused_adamw", lambda given: groups.extend(given) or SlowSGD(given[0]["params"])
    )
    times = time_others(trained(lr=0.125, weight_decay=0.5))
    assert min(times["fused_adamw"].after) > 2.9 * MS > min(times["fused_adamw"].before)
    assert min(times["adamw8bit"].after) < 2.9 * MS and times["adamw8bit"].share == 1
    (group,) = groups
    assert Counter(tuple(p.shape) for p in group["params"]) == {(64, 64): 7, (64,): 3}
    assert group["lr"] == 0.125 and group["weight_decay"] == 0.5


def test_a_part_stands_for_large_models(monkeypatch):
    monkeypatch.setattr(optimizers, "MOST", 8192)
    monkeypatch.setattr(optimizers, "LARGEST", 2048)
    share = time_others(trained())["adamw8bit"].share
    assert share == pytest.approx((2 * 2048 + 64) / (7 * 4096 + 3 * 64))


def test_which_optimizers_may_be_replaced():
    assert [*time_others(trained())] == ["adamw8bit", "fused_adamw", "torch_fused"]
    assert [*time_others(trained(fused=True))] == [*time_others(trained(AdamW))] == ["adamw8bit"]
    assert time_others(trained(AdamW8bit)) == time_others(trained(torch.optim.SGD)) == {}


ABOUT = {"adamw_elements": 10**6, "adamw_bytes": 8 * 10**6, "parameter_bytes": 4 * 10**6}


def optimizing(*times, optimizer=10 * MS, preempted=0.0, about=ABOUT):
    """A step of 40 ms, in which the optimizer takes 10 ms and other programs interrupt it."""
    cached = run(40 * MS, seed=1, preempted=preempted)
    seconds = () if optimizer is None else (optimizer,) * len(cached.seconds)
    cached = replace(cached, optimizer=seconds)
    return replace(step(matmul(40 * MS)), cached=cached, about=about, optimizers=times or None)


def other(name, before, after, share=1.0):
    """One of the pairs of blocks was disturbed."""
    return OptimizerTime(name, share, (before,) * 5 + (9.0,), (after,) * 6)


@pytest.mark.parametrize("name", ["adamw8bit", "fused_adamw"])
def test_a_saving_is_a_share_of_the_optimizers_time(name):
    case = optimizing(other(name, 4 * MS, 1 * MS))
    assert predicted(case, name).seconds == pytest.approx(7.5 * MS, rel=0.01)
    interrupted = optimizing(other(name, 4 * MS, 1 * MS), preempted=20 * MS)
    assert predicted(interrupted, name).seconds == pytest.approx(3.75 * MS, rel=0.05)
    unseen = optimizing(other(name, 4 * MS, 1 * MS, share=0.5), optimizer=None)
    assert predicted(unseen, name).seconds == pytest.approx(6 * MS)


def test_an_optimizer_that_never_steps_saves_no_time():
    times = (other(name, 4 * MS, 1 * MS) for name in ("fused_adamw", "adamw8bit"))
    case = optimizing(*times, optimizer=0.0)
    assert predicted(case, "adamw8bit").seconds is None and tips(case, "fused_adamw") == []


def test_an_optimizer_that_accumulates_gradients_counts_in_every_step():
    case = optimizing(other("fused_adamw", 4 * MS, 1 * MS))
    every_fourth = tuple(40 * MS * (i % 4 == 0) for i in range(len(case.cached.seconds)))
    case = replace(case, cached=replace(case.cached, optimizer=every_fourth))
    assert predicted(case, "fused_adamw").seconds == pytest.approx(7.5 * MS, rel=0.01)


def test_torchs_fused_adamw_is_named_where_it_saves():
    for after, named in ((2 * MS, True), (5 * MS, False)):
        times = other("fused_adamw", 4 * MS, 1 * MS), other("torch_fused", 4 * MS, after)
        (tip,) = tips(optimizing(*times), "fused_adamw")
        assert ("fused=True" in tip.why) == named


def test_adamw8bit_is_advised_for_its_bytes_even_if_it_is_slower():
    slower = optimizing(other("adamw8bit", 4 * MS, 8 * MS), other("fused_adamw", 4 * MS, 8 * MS))
    assert predicted(slower, "adamw8bit").seconds == pytest.approx(-10 * MS)
    assert predicted(slower, "adamw8bit").bytes == 5_970_000
    assert tips(slower, "fused_adamw") == []
    assert predicted(optimizing(), "adamw8bit").seconds is None
    assert tips(optimizing(about=ABOUT | {"adamw_bytes": 2_031_250}), "adamw8bit") == []


# All of them, in a profile.


@pytest.fixture
def fast_bfloat16(monkeypatch):
    """A machine whose bfloat16 products are twice as fast."""
    monkeypatch.setattr(experiments, "ceilings", lambda dtypes: CEILINGS)


def profiled(train, model, **options):
    about = {"data": [torch.ones(32, 64)] * 20, "steps": 5, "warmup": 1, "budget_s": 30.0}
    return fusedops.profile(train, model=model, **about, **options)


def test_everything_that_was_tried_is_put_back(fast_bfloat16):
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    classes = [type(module) for module in model.modules()]
    before = everything(model, optimizer)
    evidence = profiled(train, model, optimizer=optimizer).evidence
    assert evidence.patching.timed and evidence.autocast.timed and evidence.optimizers
    assert same(before, everything(model, optimizer))
    assert [type(module) for module in model.modules()] == classes


def test_real_steps_are_not_undone_but_those_of_predictions_are(fast_bfloat16):
    """One is patched, one in autocast, and one as it is beside that. A weight counts the others."""
    model, steps = Chain(), []

    def train(x):
        with torch.no_grad():
            model.norm.bias.add_(1)
        model(x).sum().backward()
        steps.append((bool(fused_modules(model)), torch.is_autocast_enabled("cpu")))

    evidence = profiled(train, model, restore=False).evidence
    assert evidence.patching.timed and evidence.autocast.timed
    assert steps.count((True, False)) == steps.count((False, True)) == 1
    assert torch.equal(model.norm.bias, torch.full((64,), len(steps) - 3.0))


def test_the_report_says_why_there_is_no_prediction(fast_bfloat16):
    model = Chain()

    def train(x):
        if torch.is_autocast_enabled("cpu"):
            raise ArithmeticError("no bfloat16 here")
        if fused_modules(model):
            raise TypeError("not patched")
        model(x).sum().backward()

    report = profiled(train, model)
    (tip,) = [tip for tip in report.advice if tip.id == "patch"]
    assert tip.predicted is None and report.evidence.autocast is None
    notes = "\n".join(report.verdict.not_checked)
    assert "saving of bf16: a step in autocast raised ArithmeticError: no bfloat16 here" in notes
    assert "saving of patch: a patched step raised TypeError: not patched" in notes


def test_a_cpu_without_fast_bfloat16_says_so(monkeypatch):
    slow = replace(CEILINGS, flops={"float32": 100e9, "bfloat16": 90e9})
    monkeypatch.setattr(experiments, "ceilings", lambda dtypes: slow)
    model = Chain()
    report = profiled(lambda x: model(x).sum().backward(), model)
    reason = "bf16: not here, bfloat16 products are no faster than float32 ones on this CPU"
    assert report.evidence.autocast is None and reason in report.verdict.not_checked


def test_saved_evidence_gives_the_same_advice():
    linear = call_time("linear", 4, 3 * MS, 1 * MS, 7)
    evidence = replace(
        optimizing(other("adamw8bit", 4 * MS, 1 * MS), other("torch_fused", 4 * MS, 2 * MS)),
        patching=Patching({"linear": 4}, (linear,), 1),
        autocast=Autocast((linear,), (9, 5), 3),
    )
    loaded = Evidence.from_dict(json.loads(json.dumps(evidence.to_dict())))
    assert loaded == evidence
    assert advise(loaded, judge(loaded)) == advise(evidence, judge(evidence))
