"""The profiler's experiments: they measure advice on real steps and undo it."""

import re
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import fusedops
from fusedops.machine import usable_cpus
from fusedops.measuring.blocks import compare_blocks
from fusedops.measuring.changes import CHANGES, Target
from fusedops.measuring.recompute import checkpointed
from fusedops.nn import QuantizedLinear
from fusedops.optim import AdamW, AdamW8bit
from fusedops.patching.core.swap import fused_modules
from fusedops.profiling.advice.advice import Advice, Saving, saving
from fusedops.profiling.advice.loading import Loop
from fusedops.profiling.advice.rules import advise
from fusedops.profiling.advice.trial import ALL_SAFE, why_not
from fusedops.profiling.collect.about import about
from fusedops.profiling.collect.experiments import ProfiledStep
from fusedops.profiling.report import Profile
from profiling.cases import batches, everything, same, trainer, training_step, workload
from profiling.synthetic import MS, matmul, step

STEPS = {"steps": 5, "warmup": 1, "budget_s": 20.0}


def live(**options):
    model, optimizer = workload()
    about = {"data": batches(), "model": model, "optimizer": optimizer} | STEPS | options
    return fusedops.profile(trainer(model, optimizer), **about), model, optimizer


@pytest.mark.usefixtures("few_pairs")
def test_measuring_threads_changes_their_number_and_puts_it_back():
    before, seen = torch.get_num_threads(), []
    fitting = int(usable_cpus())
    model, data = nn.Linear(8, 8), [torch.randn(4, 8)] * 20

    def step(batch):
        seen.append(torch.get_num_threads())
        model(batch)

    torch.set_num_threads(fitting + 2)
    try:
        report = fusedops.profile(step, data=data, model=model, **STEPS)
        seen.clear()
        report.measure("threads", budget_s=12.0)
        assert set(seen) == {fitting, fitting + 2}
        assert seen.count(fitting) == seen.count(fitting + 2)
        assert torch.get_num_threads() == fitting + 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("few_pairs")
@pytest.mark.parametrize("change", ["patch", "adamw8bit", "fused_adamw", "bf16"])
def test_measuring_leaves_everything_as_it_was(change, tmp_path):
    report, model, optimizer = live()
    before = everything(model, optimizer)
    classes, kind = [type(m) for m in model.modules()], optimizer.step.__func__
    (tip,) = report.measure(change, budget_s=12.0)
    assert tip.id == change and tip.measured.interval[0] <= tip.measured.seconds
    assert tip.measured.seconds <= tip.measured.interval[1]
    assert same(before, everything(model, optimizer))
    assert [type(m) for m in model.modules()] == classes and optimizer.step.__func__ is kind
    assert tip in report.advice and f"{tip.title}" in str(report)
    report.save(tmp_path / "report.json")
    assert Profile.load(tmp_path / "report.json").advice == report.advice


@pytest.mark.usefixtures("few_pairs")
def test_measured_bytes_of_an_optimizer_are_its_states():
    """And torch's two temporaries of a parameter's size at the peak. The user's state is left."""
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"data": [torch.randn(8, 256)] * 20, "model": model, "optimizer": optimizer}
    report = fusedops.profile(trainer(model, optimizer), **options, **STEPS)
    (tip,) = report.measure("adamw8bit", budget_s=12.0)
    expected = tip.predicted.bytes + 2 * model.weight.nbytes
    assert tip.measured.bytes == pytest.approx(expected, rel=0.02)
    assert not optimizer.state


@pytest.mark.parametrize("name, kind", [("adamw8bit", AdamW8bit), ("fused_adamw", AdamW)])
def test_an_advised_optimizer_really_runs(name, kind):
    _, optimizer = workload()
    with CHANGES[name].live(Target(optimizer=optimizer)):
        assert type(optimizer.step.__self__) is kind
    assert optimizer.step.__self__ is optimizer


@pytest.mark.usefixtures("few_pairs")
def test_measure_within_a_profile():
    """A patched model is not patched again."""
    model, data = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)), [torch.randn(64, 512)] * 9

    def report():
        options = {"data": data, "model": model, "measure": True}
        return fusedops.profile(lambda x: model(x).sum().backward(), **options, **STEPS)

    measured = {tip.id for tip in report().advice if tip.measured}
    assert "patch" in measured and measured <= {*ALL_SAFE}
    with fusedops.patched(model):
        assert "patch" not in {tip.id for tip in report().advice}


def test_what_cannot_be_measured():
    report, _, optimizer = live()
    with pytest.raises(ValueError, match="measure cannot try 'collate': it must be one of threads"):
        report.measure("collate")
    optimizer.step = optimizer.step
    with pytest.raises(ValueError, match="the optimizer's step was replaced"):
        report.measure("adamw8bit")
    loaded = Profile(report.evidence)
    with pytest.raises(RuntimeError, match=r"needs a report that fusedops\.profile made here"):
        loaded.measure("patch")


@pytest.mark.usefixtures("few_pairs")
def test_a_step_that_a_change_breaks_keeps_the_report():
    model, data = nn.Linear(8, 8), [torch.randn(4, 8)] * 20
    before = model.weight.detach().clone()

    def step(batch):
        with torch.no_grad():
            model.weight.add_(1)
        if torch.is_autocast_enabled("cpu"):
            raise ArithmeticError("no bfloat16 here")
        model(batch)

    report = fusedops.profile(step, data=data, model=model, measure=True, **STEPS)
    (tip,) = report.measure("bf16", budget_s=12.0)
    reason = "measuring bf16: the step raised ArithmeticError: no bfloat16 here"
    assert tip.measured is None and tip in report.advice
    assert reason in report.verdict.not_checked and reason in str(report)
    assert torch.equal(model.weight, before) and not torch.is_autocast_enabled("cpu")


def wrapped_by_a_scheduler(parameters):
    optimizer = torch.optim.AdamW(parameters)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    return optimizer


@pytest.mark.parametrize("make", [wrapped_by_a_scheduler, fusedops.optim.AdamW])
def test_measuring_leaves_out_what_it_cannot_try(make):
    """Moments of a large layer are most of the memory, so AdamW8bit is advised."""
    model = nn.Linear(256, 256)
    optimizer = make(model.parameters())
    options = {"data": [torch.randn(8, 256)] * 20, "model": model, "optimizer": optimizer}
    report = fusedops.profile(trainer(model, optimizer), measure=True, **options, **STEPS)
    (tip,) = [tip for tip in report.advice if tip.id == "adamw8bit"]
    assert tip.measured is None and tip.predicted.bytes > 0
    assert any(line.startswith("measuring adamw8bit: ") for line in report.verdict.not_checked)


def test_an_experiment_without_time_is_left_out():
    calls, data = [], [torch.ones(4, 8)] * 20
    report = fusedops.profile(lambda batch: calls.append(batch + 1), data=data, **STEPS)
    calls.clear()
    (tip,) = report.measure("bf16", budget_s=1e-6)
    assert tip.measured is None and calls == []
    reason = "measuring bf16: the budget had no time"
    (line,) = (line for line in report.verdict.not_checked if line.startswith(reason))
    assert re.search(r", about \S+ \S+ are needed; a budget of \d+ s has time for all$", line)
    (tip,) = report.measure("bf16", budget_s=12.0)
    assert tip.measured is not None and line not in report.verdict.not_checked


def test_the_largest_predicted_gain_is_tried_first(monkeypatch):
    order = []

    def tried(name, *_):
        order.append(name)
        return None, "not here"

    report = Profile(step(matmul(10 * MS)), subject=ProfiledStep(len), call=len)
    report._advice = [
        Advice(name, "", "", "", "", predicted=Saving(seconds=seconds))
        for name, seconds in (("threads", 1e-3), ("bf16", 2e-3))
    ]
    monkeypatch.setattr("fusedops.profiling.report.tried", tried)
    report.measure("threads", "bf16")
    assert order == ["bf16", "threads"]


# Experiments on blocks of steps.


class Clock:
    """A step that computes for a chosen time, twice as long under a change."""

    def __init__(self, seconds):
        self.seconds, self.factor = seconds, 1.0

    def step(self):
        end = time.thread_time() + self.seconds * self.factor
        while time.thread_time() < end:
            pass

    @contextmanager
    def slower(self):
        self.factor = 2.0
        yield
        self.factor = 1.0


def test_an_experiment_finds_a_slowdown():
    clock = Clock(4e-3)
    loss = saving(*compare_blocks(clock.step, clock.slower, 2.0))
    low, high = loss.interval
    assert low <= loss.seconds <= high < 0
    assert loss.seconds == pytest.approx(-4e-3, rel=0.5)


def test_an_experiment_ends_when_a_change_is_too_slow():
    clock = Clock(1e-3)

    @contextmanager
    def stuck():
        clock.factor = 300.0
        yield
        clock.factor = 1.0

    start = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"the budget had time for \d+ of at least 12 rounds"):
        compare_blocks(clock.step, stuck, 0.2)
    assert time.perf_counter() - start < 6


# Memory: checkpointed blocks, the loss alone, frozen weights.

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 64}

SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}

T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 64}

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**{k: v for k, v in SIZES.items() if "key_value" not in k})
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=0, **T5)
    ),
}


def training(name, batch=4, length=64, words=64):
    model = MODELS[name]().train()
    model.resize_token_embeddings(words)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(words, (batch, length))
    return model, optimizer, training_step(model, optimizer, ids), ids


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_blocks_give_the_same_gradients_and_are_put_back(name):
    model, _, _, ids = training(name)
    names = [block for block, m in model.named_modules() if hasattr(m, "gradient_checkpointing")]
    names = [block_path for block_path in names if block_path.rpartition(".")[2].isdigit()]

    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected, ran = gradients(), []
    held = {path: dict(vars(module)) for path, module in model.named_modules()}
    handle = model.get_submodule(names[0]).register_forward_hook(lambda *_: ran.append(1))
    inner = next(m for m in model.get_submodule(names[0]).modules() if isinstance(m, nn.Linear))
    inner_handle = inner.register_forward_hook(lambda *_: ran.append(2))
    with checkpointed(model, names):
        assert same(expected, gradients())
    handle.remove(), inner_handle.remove()
    assert ran.count(1) == 1 and ran.count(2) == 2
    now = {path: dict(vars(module)) for path, module in model.named_modules()}
    assert [v.keys() for v in now.values()] == [v.keys() for v in held.values()]
    with checkpointed(model, names), pytest.raises(KeyError), checkpointed(model, names):
        raise KeyError
    assert "forward" not in vars(model.get_submodule(names[0]))


def test_a_forward_of_the_users_own_is_put_back():
    model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
    user_forward = model[0].forward = lambda x: x + 1
    with checkpointed(model, ["0"]):
        assert model[0].forward is not user_forward
        assert model[0](torch.ones(2, requires_grad=True)).tolist() == [2, 2]
    assert model[0].forward is user_forward


@pytest.mark.usefixtures("any_size", "few_pairs")
def test_measured_bytes_go_with_the_predicted_ones_and_all_is_put_back():
    model, optimizer, train, ids = training("llama", batch=8, words=1024)
    options = {"data": [ids] * 40, "model": model, "optimizer": optimizer}
    report = fusedops.profile(lambda _: train(), **options, **STEPS)
    before, classes = everything(model, optimizer), [type(m) for m in model.modules()]
    for tip in report.measure("checkpoint", "loss", budget_s=25.0):
        if tip.id == "loss":
            assert tip.measured.bytes == pytest.approx(tip.predicted.bytes, rel=0.1)
        assert 0.3 * tip.predicted.bytes < tip.measured.bytes <= 1.1 * tip.predicted.bytes
        assert tip.measured.interval[0] <= tip.measured.seconds <= tip.measured.interval[1]
    assert same(before, everything(model, optimizer)) and not fused_modules(model)
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.usefixtures("few_pairs")
def test_quantized_frozen_weights_are_predicted_measured_and_put_back():
    layers = nn.Linear(256, 256), nn.Linear(256, 512), nn.Linear(512, 4)
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    for layer in layers[:2]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"data": [torch.randn(8, 256)] * 40, "model": model, "optimizer": optimizer}
    report = fusedops.profile(trainer(model, optimizer), **options, **STEPS)
    before, modules = everything(model, optimizer), [*model.children()]
    (tip,) = report.measure("quantize_lora", budget_s=12.0)
    assert tip.predicted.seconds is None and "report.measure('quantize_lora')" in tip.why
    weights = 256 * 256 + 512 * 256
    assert tip.predicted.bytes == round((4 - 4.5 / 8) * weights)
    assert tip.measured.bytes == pytest.approx(tip.predicted.bytes, rel=0.05)
    assert same(before, everything(model, optimizer))
    assert [*map(id, model.children())] == [*map(id, modules)]


def test_a_linear_with_two_paths_counts_once():
    linear = nn.Linear(256, 256).requires_grad_(False)
    model = nn.Sequential(linear, nn.Tanh(), linear, nn.Linear(256, 4))
    assert about(model)["frozen_bytes"] == linear.weight.nbytes  # the trained one does not count
    with CHANGES["quantize_lora"].live(Target(model)):
        assert isinstance(model[0], QuantizedLinear) and model[0] is model[2]
    assert model[0] is model[2] is linear


def test_the_first_fsdp_is_sharded():
    class FullyShardedDataParallel(nn.Module):
        pass

    assert not about(nn.Linear(2, 2))["sharded"]
    assert about(nn.Sequential(FullyShardedDataParallel()))["sharded"]


# Workers of a DataLoader.


class Items(Dataset):
    def __init__(self, count=64):
        self.items = torch.arange(float(count)).reshape(-1, 1)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index], torch.utils.data.get_worker_info() is not None


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(1)] * 4)


def test_a_loop_with_workers_reads_the_same_batches_and_ends_them():
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(Items(), generator=generator)
    loader = DataLoader(Items(), batch_size=8, sampler=sampler)
    seen, state = [], generator.get_state()
    loop = Loop(seen.append, loader, 1)
    for _ in range(9):  # more than an epoch
        loop.once()
    with loop.change():
        for _ in range(8):
            loop.once()
    loop.once()
    workers = loop._other._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    by_worker = [bool(flags.all()) for _, flags in seen]
    assert by_worker == [False] * 9 + [True] * 8 + [False]
    for epoch in (seen[:8], seen[9:17]):
        items = torch.cat([batch for batch, _ in epoch])
        assert sorted(items.flatten().tolist()) == list(range(64))
    loop.close()
    assert not any(worker.is_alive() for worker in workers)
    assert torch.equal(generator.get_state(), state)


def test_what_cannot_be_tried_says_why():
    def because(name, cpus=2.0, **parts):
        return why_not(name, ProfiledStep(print, **parts), step(matmul(10 * MS), cpus=cpus))

    items = Items()
    assert because("workers", data=DataLoader(items)) == ""
    assert because("workers", cpus=1.0, data=DataLoader(items)) == "no CPU is free for a worker"
    assert because("workers", data=[items]) == "the data is not a torch DataLoader"
    assert "iterable dataset" in because("workers", data=DataLoader(Stream()))
    busy = DataLoader(items, num_workers=2)
    assert because("workers", data=busy) == "the DataLoader has 2 workers"
    for name in ("checkpoint", "loss", "patch"):
        assert because(name) == "no model was given"
    assert "no list of blocks" in because("checkpoint", model=nn.Linear(1, 1))
    trained = nn.Sequential(nn.Linear(2, 2))
    assert because("quantize_lora", model=trained).endswith("none of the frozen linears")


class Slow(Dataset):
    """Each item sleeps, so that a worker saves most of the wait even on a busy machine."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        time.sleep(2e-3)
        return torch.randn(16)


def test_workers_are_measured_on_the_whole_loop():
    loader = DataLoader(Slow(), batch_size=4, shuffle=True)
    model = nn.Linear(16, 16)

    def compute(batch):
        end = time.perf_counter() + 6e-3
        while time.perf_counter() < end:
            model(batch)

    report = fusedops.profile(compute, data=loader, model=model, **STEPS)
    evidence = replace(report.evidence, cpus=2.0, threads=1)
    report.evidence, report._advice = evidence, advise(evidence, report.verdict)
    state = torch.get_rng_state()
    (tip,) = report.measure("workers", budget_s=12.0)
    low, high = tip.measured.interval
    assert 0 < low <= tip.measured.seconds <= high and tip.measured.bytes is None
    assert torch.equal(state, torch.get_rng_state())
