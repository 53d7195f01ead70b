"""The profiler's advice on checkpointing, loss, offload, ZeRO, frozen weights and data workers."""

import time
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import fusedops
from fusedops.measuring.changes import CHANGES, Target
from fusedops.measuring.recompute import checkpointed
from fusedops.nn import QuantizedLinear
from fusedops.patching.core.swap import fused_modules
from fusedops.profiling.advice.loading import Loop, why_no_workers
from fusedops.profiling.advice.memory_rules import LARGE
from fusedops.profiling.advice.rules import advise
from fusedops.profiling.advice.trial import why_not
from fusedops.profiling.collect.experiments import ProfiledStep, about
from fusedops.profiling.evidence import Evidence, Loader, Patching, SiteTime
from fusedops.profiling.judge import judge
from profiling.cases import everything, same
from profiling.synthetic import MS, gpu_step, matmul, run, step, tiny

MIB = 2**20
MEMORY = {"peak": 100 * MIB, "activations": 50 * MIB, "logits": 12 * MIB}
MEMORY |= {"optimizer_state": 30 * MIB}


def advice(evidence):
    return {tip.id: tip for tip in advise(evidence, judge(evidence))}


def recomputed(**changes):
    return step(matmul(10 * MS), **({"memory": MEMORY, "about": {"blocks": 2}} | changes))


def test_checkpointing_needs_blocks_and_large_activations():
    few = MEMORY | {"activations": round(LARGE * 100 * MIB) - 1}
    for changes in ({"memory": few}, {"memory": None}, {"about": {"blocks": 0}}):
        assert "checkpoint" not in advice(recomputed(**changes))
    assert "checkpoint" in advice(recomputed(memory=few | {"activations": 40 * MIB}))


def test_checkpointing_costs_a_forward_and_saves_no_more_than_activations():
    tip = advice(recomputed())["checkpoint"]
    assert (tip.predicted.bytes, tip.predicted.seconds) == (50 * MIB, None)
    steps = run(10 * MS)
    steps = replace(steps, forward=(3 * MS,) * len(steps.seconds))
    tip = advice(recomputed(cached=steps))["checkpoint"]
    assert tip.predicted.seconds == pytest.approx(-3 * MS) and "2 blocks" in tip.title


def test_transformers_method_is_the_change_where_there_is_one():
    assert "checkpoint(block" in advice(recomputed())["checkpoint"].how
    about = {"blocks": 2, "checkpointing": "activation_checkpointing_enable"}
    tip = advice(recomputed(about=about))["checkpoint"]
    assert tip.how == "model.activation_checkpointing_enable()"


def site(kind, before, after, size=0):
    return SiteTime(kind, "Head", "[8, 8]", 1, (before,) * 4, (after,) * 4, size)


def test_the_loss_alone_where_logits_are_among_the_largest_activations():
    timed = (site("loss", 5 * MS, 3 * MS, 9 * MIB), site("norm", 2 * MS, 1 * MS, 4 * MIB))
    case = recomputed(
        patching=Patching({"loss": 1, "norm": 4}, timed),
        activations={"layers.0": 20 * MIB, "layers.1": 13 * MIB, "layers.2": 11 * MIB},
    )
    tip = advice(case)["loss"]
    assert (tip.predicted.seconds, tip.predicted.bytes) == (pytest.approx(2 * MS), 9 * MIB)
    assert "norm=False" in tip.how and "loss=" not in tip.how
    larger = case.activations | {"head": 14 * MIB}
    assert "loss" not in advice(replace(case, activations=larger))
    assert "loss" not in advice(replace(case, patching=Patching({"norm": 4}, timed[1:])))
    assert "loss" not in advice(replace(case, memory=MEMORY | {"logits": 0}))
    untimed = replace(case, patching=Patching({"loss": 1}))
    assert advice(untimed)["loss"].predicted is None


def test_state_goes_to_the_host_only_from_a_gpu():
    on_gpu = replace(gpu_step(), memory=MEMORY)
    assert advice(on_gpu)["offload"].predicted.bytes == 30 * MIB
    assert "offload" not in advice(replace(on_gpu, memory=MEMORY | {"optimizer_state": 29 * MIB}))
    assert "offload" not in advice(recomputed())


def test_zero_divides_the_state_among_ranks_that_there_are():
    steps = run(10 * MS)
    steps = replace(steps, optimizer=(4 * MS,) * len(steps.seconds))
    tip = advice(recomputed(processes=4, cached=steps))["zero"]
    assert tip.predicted.bytes == round(0.75 * 30 * MIB)
    assert tip.predicted.seconds == pytest.approx(3 * MS)
    gpus = replace(gpu_step(), memory=MEMORY, about={"gpus": 2})
    tip = advice(gpus)["zero"]
    assert (tip.predicted.seconds, tip.predicted.bytes) == (None, 15 * MIB)
    for none in (
        recomputed(),
        recomputed(processes=4, about={"sharded": True}),
        recomputed(processes=4, memory=MEMORY | {"optimizer_state": 29 * MIB}),
        replace(gpus, about={"gpus": 1}),
    ):
        assert "zero" not in advice(none)


def test_zero_saves_what_memory_plans():
    config = transformers.LlamaConfig(**SIZES)
    sizes = {"batch": 1, "length": 8}
    whole, part = (
        fusedops.memory(config, world=world, strategy="zero1", **sizes).optimizer_state
        for world in (1, 4)
    )
    memory = {"optimizer_state": whole, "peak": 2 * whole, "activations": 0, "logits": 0}
    tip = advice(recomputed(processes=4, memory=memory))["zero"]
    assert tip.predicted.bytes == pytest.approx(whole - part, rel=1e-3)


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
    torch.manual_seed(0)
    model = MODELS[name]().train()
    model.resize_token_embeddings(words)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, train, torch.randint(words, (batch, length))


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


@pytest.mark.parametrize("change", ["checkpoint", "loss"])
def test_measured_bytes_go_with_the_predicted_ones_and_all_is_put_back(change, any_size):
    model, optimizer, train, ids = training("llama", batch=8, words=1024)
    options = {"data": [ids] * 40, "optimizer": optimizer}
    report = fusedops.profile(train, model=model, steps=5, warmup=1, **options)
    assert change in report.measurable
    before, classes = everything(model, optimizer), [type(m) for m in model.modules()]
    (tip,) = report.measure(change, budget_s=60.0)
    if change == "checkpoint":  # an upper bound
        assert 0.3 * tip.predicted.bytes < tip.measured.bytes <= 1.02 * tip.predicted.bytes
    else:
        assert tip.predicted.bytes > 0
        assert tip.measured.bytes == pytest.approx(tip.predicted.bytes, rel=0.1)
    assert tip.measured.interval[0] <= tip.measured.seconds <= tip.measured.interval[1]
    assert same(before, everything(model, optimizer)) and not fused_modules(model)
    assert [type(m) for m in model.modules()] == classes


def frozen_model():
    torch.manual_seed(0)
    layers = nn.Linear(256, 256), nn.Linear(256, 512), nn.Linear(512, 4)
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return model, torch.optim.SGD(layers[2].parameters(), lr=0.1)


@pytest.mark.parametrize("holds", ["trained", "all"])
def test_quantized_frozen_weights_are_predicted_measured_and_put_back(holds):
    model, optimizer = frozen_model()
    if holds == "all":
        optimizer = torch.optim.AdamW(model.parameters())

    def train(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    options = {"data": [torch.randn(8, 256)] * 40, "optimizer": optimizer}
    report = fusedops.profile(train, model=model, steps=5, warmup=1, **options)
    before, layers = everything(model, optimizer), [*model.children()]
    (tip,) = report.measure("quantize_lora", budget_s=60.0)
    assert tip.predicted.seconds is None and "report.measure('quantize_lora')" in tip.why
    weights = 256 * 256 + 512 * 256
    assert tip.predicted.bytes == round((4 - 4.5 / 8) * weights)
    assert tip.measured.bytes == pytest.approx(tip.predicted.bytes, rel=0.05)
    assert same(before, everything(model, optimizer))
    assert [*map(id, model.children())] == [*map(id, layers)]
    assert Evidence.from_dict(report.evidence.to_dict()) == report.evidence


def test_a_linear_with_two_paths_counts_once():
    linear = nn.Linear(256, 256).requires_grad_(False)
    model = nn.Sequential(linear, nn.Tanh(), linear, nn.Linear(256, 4))
    assert about(model)["frozen_bytes"] == linear.weight.nbytes
    with CHANGES["quantize_lora"].live(Target(model)):
        assert isinstance(model[0], QuantizedLinear) and model[0] is model[2]
    assert model[0] is model[2] is linear


def test_the_first_fsdp_is_sharded():
    class FullyShardedDataParallel(nn.Module):
        pass

    assert not about(nn.Linear(2, 2))["sharded"]
    assert about(nn.Sequential(FullyShardedDataParallel()))["sharded"]


def test_quantize_lora_needs_frozen_linears():
    unfrozen = ProfiledStep(print, model=nn.Sequential(nn.Linear(2, 2)))
    assert why_not("quantize_lora", unfrozen, recomputed()).endswith("none of the frozen linears")


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


def test_data_that_workers_cannot_read():
    items = Items()
    assert why_no_workers(DataLoader(items)) == ""
    assert why_no_workers([items]) == "the data is not a torch DataLoader"
    assert "iterable dataset" in why_no_workers(DataLoader(Stream()))
    assert why_no_workers(DataLoader(items, num_workers=2)) == "the DataLoader has 2 workers"


def test_what_cannot_be_tried_says_why():
    def because(name, evidence, **parts):
        return why_not(name, ProfiledStep(print, **parts), evidence)

    busy, loader = recomputed(cpus=1.0), DataLoader(Items())
    assert because("workers", busy, data=loader) == "no CPU is free for a worker"
    assert because("workers", recomputed(), data=loader) == ""
    for name in ("checkpoint", "loss", "patch"):
        assert because(name, recomputed()) == "no model was given"
    assert "no list of blocks" in because("checkpoint", recomputed(), model=nn.Linear(1, 1))


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

    report = fusedops.profile(compute, data=loader, model=model, steps=8, warmup=1)
    evidence = replace(report.evidence, cpus=2.0, threads=1)
    report.evidence, report._advice = evidence, advise(evidence, report.verdict)
    state = torch.get_rng_state()
    (tip,) = report.measure("workers", budget_s=60.0)
    low, high = tip.measured.interval
    assert 0 < low <= tip.measured.seconds <= high and tip.measured.bytes is None
    assert torch.equal(state, torch.get_rng_state())


def test_the_batch_costs_memory():
    loader = Loader(batches_per_s=25.0)
    evidence = step(tiny(10 * MS), elasticity=0.0, memory=MEMORY, loader=loader)
    assert advice(evidence)["batch"].predicted.bytes == -62 * MIB
