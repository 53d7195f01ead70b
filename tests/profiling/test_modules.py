"""The profiler assigns each operator to the module that ran it, in the backward too."""

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from fusedops import patch, unpatch
from fusedops.profiling.collect.arithmetic import Arithmetic
from fusedops.profiling.collect.modules import Modules
from fusedops.profiling.collect.operators import Recorder

WIDTHS = {"first": 16, "second.inner": 24, "third": 8}  # every layer's products have own shapes


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 24, bias=False)
        self.dropout_with_a_long_name = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout_with_a_long_name(self.inner(x))


class Model(nn.Module):
    def __init__(self, checkpointing=None):
        super().__init__()
        self.first, self.second = nn.Linear(4, 16, bias=False), Inner()
        self.third, self.checkpointing = nn.Linear(24, 8, bias=False), checkpointing

    def forward(self, x):
        x = self.first(x)
        x = (
            self.second(x)
            if self.checkpointing is None
            else checkpoint(self.second, x, **self.checkpointing)
        )
        return self.third(x)


def recorded(model, step):
    """Operator -> its modules."""
    with Modules() as modules, Recorder(modules) as recorder:
        step()
    ops = defaultdict(set)
    for key in recorder.rows:
        ops[key.name].add((key.module, key.shapes))
    return ops


def products(ops):
    """Module -> in how many products its layer's width occurs."""
    counts = defaultdict(int)
    for module, shapes in ops["aten::mm"]:
        assert f"{WIDTHS[module]}" in shapes.replace("[", " ").replace("]", " ").replace(",", " ")
        counts[module] += 1
    return counts


@pytest.mark.parametrize(
    "checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str
)
def test_forward_and_backward(checkpointing):
    """The first layer's input needs no gradient: torch's ModuleTracker never leaves it."""
    model = Model(checkpointing)
    ops = recorded(model, lambda: model(torch.randn(3, 4)).sum().backward())
    assert products(ops) == {"first": 2, "second.inner": 3, "third": 3}
    dropout = {module for name in ("aten::bernoulli_", "aten::mul") for module, _ in ops[name]}
    assert {"second.dropout_with_a_long_name"} == dropout


def test_the_models_own_operators_have_its_classs_name():
    """They are not outside of the model, in the backward neither; a loss outside of it is."""

    class Scaled(Model):
        def forward(self, x):
            return super().forward(x).tanh()

    model = Scaled()
    ops = recorded(model, lambda: model(torch.randn(3, 4)).exp().sum().backward())
    assert {module for module, _ in ops["aten::tanh"]} == {"Scaled"}
    assert {module for module, _ in ops["aten::tanh_backward"]} == {"Scaled"}
    assert {module for module, _ in ops["aten::exp"]} == {""}


def test_the_optimizer_is_in_no_module():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    assert {module for module, _ in recorded(model, step)["aten::addcdiv_"]} == {""}


def test_a_forward_that_raises_is_left():
    model = Model()
    with Modules() as modules:
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        assert modules.current() == ""


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **sizes))


def trained(model):
    ids = torch.arange(24).view(2, 12) % 96
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_patched_model_is_recorded_as_it_runs():
    """Every fused function runs its kernel, gradients are the same bits, arithmetic is equal."""
    model = llama()
    patch(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        expected = trained(model)
    ran = {op.key for op in profiled.key_averages() if op.key.endswith(("_forward", "_backward"))}
    with Modules() as modules, Recorder(modules) as recorder:
        gradients = trained(model)
    seen = {key.name for key in recorder.rows if key.name.startswith("fusedops::")}
    assert seen == {name for name in ran if name.startswith("fusedops::")}
    families = {name.partition("::")[2].rpartition("_")[0] for name in seen}
    assert families >= {"gated_activation", "linear_cross_entropy", "norm", "rotary"}
    assert all(map(torch.equal, gradients, expected))
    with Arithmetic() as fused:
        trained(model)
    unpatch(model)
    with Arithmetic() as plain:
        trained(model)
    assert fused.flops == plain.flops


def test_other_hooks_still_see_every_module():
    """A user's hook of all modules takes the fused functions' place, as without a recorder."""
    model, called = llama(), set()
    patch(model)
    handle = register_module_forward_hook(lambda module, *_: called.add(type(module).__name__))
    try:
        with Modules():
            trained(model)
    finally:
        handle.remove()
    assert {"LlamaRMSNorm", "SiLUActivation"} <= called
