"""low_latency: the same tokens, by a static cache and a compiled step, and unpatch undoes it."""

import pytest
import torch
from torch import nn

import fusedops
from fusedops.nn import QuantizedLinear
from fusedops.patching.core.swap import fused_modules
from fusedops.sweeping.variants import variant

transformers = pytest.importorskip("transformers")

WORDS = 96


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generated(model: nn.Module, **options) -> torch.Tensor:
    torch.manual_seed(1)
    ids = torch.randint(WORDS, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return model.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=6, max_new_tokens=6, **options
    )


def test_a_compiled_step_gives_the_same_tokens(model, monkeypatch):
    """One graph serves all later tokens."""
    expected, before = generated(model), model.generation_config
    report = fusedops.low_latency(model)
    compiled = []
    original = type(model).get_compiled_call
    monkeypatch.setattr(
        type(model),
        "get_compiled_call",
        lambda self, config: compiled.append(config) or original(self, config),
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(generated(model), expected)
    assert compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert report.notes[-1].startswith("low_latency: static cache, and torch.compile")
    fusedops.unpatch(model)
    assert model.generation_config is before
    assert not fused_modules(model)
    compiled.clear()
    assert torch.equal(generated(model), expected)
    assert not compiled


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_without_compiling(model, cache):
    expected, before = generated(model), model.generation_config
    fusedops.low_latency(model, cache=cache, compile=False)
    assert model.generation_config.cache_implementation == (None if cache == "dynamic" else cache)
    assert torch.equal(generated(model), expected)
    assert fused_modules(model)
    fusedops.unpatch(model)
    assert model.generation_config is before


def test_twice_is_undone_once(model):
    before = model.generation_config
    fusedops.low_latency(model, compile=False)
    fusedops.low_latency(model)
    fusedops.unpatch(model)
    fusedops.unpatch(model)
    assert model.generation_config is before


def test_the_last_call_counts(model):
    before = model.generation_config
    fusedops.low_latency(model)
    fusedops.low_latency(model, compile=False)
    assert model.generation_config.compile_config is None
    fusedops.low_latency(model, cache="dynamic", compile=False)
    assert model.generation_config is before


def test_an_eager_variant_is_eager(model):
    before = model.generation_config
    fusedops.low_latency(model)
    eager = variant("eager", "generate").model(model)
    assert eager.generation_config is before
    assert model.generation_config.cache_implementation == "static"
    fusedops.unpatch(nn.ModuleList([model]))
    assert model.generation_config is before


def test_quantized_weights_stay(model):
    fusedops.low_latency(model, compile=False, quantize="nf4")
    fusedops.unpatch(model)
    assert any(isinstance(m, QuantizedLinear) for m in model.modules())


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"cache": "paged"}, ValueError, "cache must be one of static, dynamic, got 'paged'"),
        ({"cache": "dynamic"}, ValueError, 'compile must be False with cache="dynamic"'),
        ({"compile": False, "quantize": "int3"}, ValueError, "format must be"),
    ],
)
def test_bad_arguments(model, given, error, text):
    before = model.generation_config
    with pytest.raises(error, match=text):
        fusedops.low_latency(model, **given)
    assert model.generation_config is before
    assert not fused_modules(model)


def test_a_model_must_generate():
    with pytest.raises(TypeError, match="must be a transformers model that generates, got Linear"):
        fusedops.low_latency(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got int"):
        fusedops.low_latency(3)
