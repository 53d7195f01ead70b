"""Patched models under torch.compile, export and jit.trace: results, and which sizes are fused."""

import copy
from contextlib import nullcontext

import pytest
import torch
from axes import grid
from calling import Calls, operators
from torch import nn
from torch.testing import assert_close

from fusedops import backend, fuse_always, patch
from fusedops.patching.core.thresholds import LOOP, PRODUCT

transformers = pytest.importorskip("transformers")
from patching.models.attention_models import batch, build  # noqa: E402

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


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return Llama().eval()


@pytest.fixture
def model(plain):
    """With what decides by size, and no linears."""
    model = copy.deepcopy(plain)
    patch(model, linear=False, attention=False)
    return model


@pytest.fixture
def linears():
    built = Up()
    with fuse_always():  # on every machine
        patch(built)
    return built


@grid("elements,expected", [(LOOP - N, set()), (LOOP, FUSED)])
def test_few_elements_are_inductors_and_many_are_ours(model, elements, expected):
    assert set(operators(model, inputs(elements))) == expected


@grid("elements,expected", [(PRODUCT - N, []), (PRODUCT, ["linear", "linear"])])
def test_products_of_few_elements_are_inductors_and_others_ours(linears, elements, expected):
    assert operators(linears, inputs(elements)) == expected


@pytest.mark.parametrize(("length", "expected"), [(8, set()), (40, set()), (256, {"attention"})])
def test_attention_with_a_bias(length, expected):
    """T5's: in eager calls it is ours of any size."""
    torch.manual_seed(0)
    sizes = {"d_model": N, "d_ff": N, "d_kv": N // 4, "num_heads": 4, "num_layers": 1}
    model = transformers.T5EncoderModel(transformers.T5Config(**sizes, vocab_size=32)).eval()
    patch(model, **dict.fromkeys(("norm", "residual", "mlp", "linear"), False))
    encoder = Calls(lambda x: model(inputs_embeds=x).last_hidden_state, model=model)
    assert set(operators(encoder, inputs(length * N))) == expected


def test_eager_calls_of_few_elements_are_ours(model, sums):
    with torch.no_grad():
        model(inputs(8 * N))
    assert sums.call_count == 1


def test_a_forced_backend_keeps_its_operators(model, linears):
    with backend("reference"):
        assert set(operators(model, inputs(8 * N))) == FUSED
        assert operators(linears, inputs(8 * N)) == ["linear", "linear"]


def test_sizes_that_are_symbols(plain):
    """A dynamic dimension adds no guard.

    Linears and attention use our kernels; the rest is left to Inductor.
    """
    with fuse_always():  # chooses linears on every machine
        patch(plain)
    x = inputs(40 * N)
    torch._dynamo.mark_dynamic(x, 1, min=2, max=10**6)
    assert set(operators(plain, x)) == {"linear", "attention"}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("least", "length"), [(2, 8), (2, 40), (20, 40)])
def test_export_of_any_length(plain, least, length, strict):
    """An exported model takes other lengths than the example's."""
    model = copy.deepcopy(plain)
    patch(model)
    sizes = {"x": {1: torch.export.Dim("length", min=least, max=10**6)}}
    with torch.no_grad():
        shown = (inputs(length * N),)
        run = torch.export.export(model, shown, strict=strict, dynamic_shapes=sizes).module()
        for other in (least + 3, 40, 300):
            x = inputs(other * N)
            assert_close(run(x), plain(x), rtol=1e-4, atol=1e-5)


def test_training_by_inductor(plain):
    """Steps of other lengths; the second one makes sizes symbolic."""
    model = copy.deepcopy(plain)
    patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for length in (8, 24, 300):
        x = inputs(length * N)
        grads, expected = (gradients(run, of, x) for run, of in ((compiled, model), (plain, plain)))
        assert_close(grads, expected, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


def gradients(run, model, x):
    x = x.clone().requires_grad_()
    loss = run(x).square().sum()
    leaves = [x, *(p for name, p in model.named_parameters() if "embed_tokens" not in name)]
    return torch.autograd.grad(loss, leaves)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("always", [False, True], ids=["by size", "any size"])
@grid(side=[None, "left"], name=["llama", "bert", "gemma2"])
def test_jit_trace(name, side, always):
    """Sizes are tensors then. Gemma 2's attention is eager's, with a mask of numbers."""
    model, given = build(name), batch(name, side)

    def logits(*tensors):
        return model(**dict(zip(given, tensors, strict=True)), use_cache=False).logits

    with fuse_always() if always else nullcontext(), torch.no_grad():
        patch(model)
        run, tensors = Calls(logits, model=model), tuple(given.values())
        expected = run(*tensors)
        traced = torch.jit.trace(run, tensors)
        assert_close(traced(*tensors), expected, rtol=1e-4, atol=1e-5)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("fusedops::attention") == 2  # of sizes that nothing is known about


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("attention", [False, True])
def test_jit_trace_with_gradients(attention):
    """GPT-2's products have a bias, so that each is an operator of ours."""
    model, given = build("gpt2"), batch("gpt2", None)
    patch(model, attention=attention)
    ids = given["input_ids"]

    run = Calls(lambda ids: model(input_ids=ids, use_cache=False).logits, model=model)
    assert_close(torch.jit.trace(run, (ids,))(ids), model(ids).logits, rtol=1e-4, atol=1e-5)


@grid("name,was", [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager")])
def test_attention_is_ours_in_a_graph(name, was, any_size):
    """Its view of the config is read by torch.compile too."""
    model = build(name)
    model.set_attn_implementation(was)
    assert patch(model, linear=False, loss=False).coverage["attention"] == (2, 2)
    run = Calls(lambda ids: model(ids, use_cache=False).logits, model=model)
    for implementation, expected in ((was, 2), ("eager" if was == "sdpa" else "sdpa", 0)):
        model.config._attn_implementation = implementation
        if name == "llama" or expected:  # Gemma 2 has no sdpa
            assert operators(run, batch(name)["input_ids"]).count("attention") == expected
