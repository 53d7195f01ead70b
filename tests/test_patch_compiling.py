"""Sites under torch.compile: of few elements, Inductor has the lines as they were written."""

import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close

from fusedops import patch, unpatch
from fusedops.patching.compiling import LOOP, PRODUCT

N = 64
FUSED = {"rms_norm", "add_rms_norm", "rotary_embedding", "swiglu"}


class Llama(nn.Module):
    """A layer with every kind of site that steps aside."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": N, "intermediate_size": N, "vocab_size": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        config = transformers.LlamaConfig(**sizes, **heads, num_hidden_layers=1)
        self.model = transformers.LlamaModel(config)

    def forward(self, x):
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class Up(nn.Module):
    """A linear, and one with the activation that follows it."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(N, N), nn.Linear(N, N), nn.GELU()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def inputs(elements):
    return torch.randn(1, elements // N, N)


def operators(model, x, **how):
    """Our operators in the one graph that torch.compile makes of a call."""
    names = []

    def collect(graph, example):
        targets = map(str, (node.target for node in graph.graph.nodes))
        names.extend(t.split(".")[1] for t in targets if t.startswith("fusedops."))
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(model, backend=collect, fullgraph=True, **how)(x)
        assert_close(result, model(x), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    return names


@pytest.fixture
def model():
    built = Llama().eval()
    patch(built, linear=False, attention=False)
    return built


@pytest.fixture
def linears():
    built = Up()
    patch(built)
    return built


def test_few_elements_are_inductors(model):
    assert operators(model, inputs(LOOP - N)) == []


def test_many_elements_are_ours(model):
    assert set(operators(model, inputs(LOOP))) == FUSED


def test_products_of_few_elements_are_inductors(linears):
    assert operators(linears, inputs(PRODUCT - N)) == []


def test_products_of_many_elements_are_ours(linears):
    assert operators(linears, inputs(PRODUCT)) == ["linear", "linear"]


def test_eager_calls_of_few_elements_are_ours(model, sums):
    with torch.no_grad():
        model(inputs(8 * N))
    assert sums.call_count == 1


def test_sizes_that_are_symbols_make_no_guard(linears):
    """A dimension that the caller has declared dynamic over all sizes."""
    x = inputs(8 * N)
    torch._dynamo.mark_dynamic(x, 1, min=2, max=10**6)
    assert operators(linears, x) == ["linear", "linear"]


def test_a_training_step(linears):
    x = inputs(8 * N).requires_grad_()
    torch._dynamo.reset()
    got = torch.compile(linears, backend="aot_eager", fullgraph=True)(x).square().sum()
    found = torch.autograd.grad(got, [x, *linears.parameters()])
    unpatch(linears)
    wanted = torch.autograd.grad(linears(x).square().sum(), [x, *linears.parameters()])
    assert_close(found, wanted)
    torch._dynamo.reset()
