"""low_latency gives the same tokens, and unpatch undoes it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fusedops
from fusedops.patching.core.swap import fused_modules
from fusedops.sweeping.variants import variant

pytest.importorskip("transformers")
from transformers import StaticCache

from patching.models.attention_models import batch, build


@pytest.fixture
def model():
    return build("llama")


def generated(model: nn.Module) -> torch.Tensor:
    options = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6}
    return model.generate(**batch("llama", "left"), **options)


def test_a_compiled_step_gives_the_same_tokens(model, recorded):
    """One graph serves all later tokens."""
    expected, before = generated(model), model.generation_config
    report = fusedops.low_latency(model)
    compiled = recorded(type(model), "get_compiled_call")
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


def test_the_last_call_counts(model):
    before = model.generation_config
    fusedops.low_latency(model)
    fusedops.low_latency(model, compile=False)
    assert model.generation_config.compile_config is None
    fusedops.low_latency(model, cache="dynamic", compile=False)
    assert model.generation_config is before


def test_files_have_the_earlier_settings(model, tmp_path):
    """A checkpoint must not make whoever loads it use a static cache."""
    fusedops.low_latency(model)
    model.generation_config.max_new_tokens = 5  # by the user, later
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).generation_config
    assert (loaded.cache_implementation, loaded.max_new_tokens) == (None, 5)
    settings = pickle.loads(pickle.dumps(model)).generation_config
    assert (settings.cache_implementation, settings.compile_config) == (None, None)
    assert type(settings) is type(loaded)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_keep_the_settings(model, copied):
    fusedops.low_latency(model)
    settings = copied(model.generation_config)
    settings.max_new_tokens = 5
    assert settings.cache_implementation == "static"
    assert settings.compile_config is not None
    assert model.generation_config.max_new_tokens is None


def test_unpatch_undoes_a_copy(model):
    before = type(model.generation_config)
    fusedops.low_latency(model)
    copied = copy.deepcopy(model)
    fusedops.unpatch(copied)
    assert type(copied.generation_config) is before is not type(model.generation_config)
    assert copied.generation_config.cache_implementation is None
    assert model.generation_config.cache_implementation == "static"


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_peft_generates_with_the_static_cache(model, task, recorded):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type=task))
    before = model.generation_config
    fusedops.low_latency(wrapped, compile=False)
    cache_inits = recorded(StaticCache, "__init__")
    generated(wrapped)
    assert cache_inits
    fusedops.unpatch(wrapped)
    assert wrapped.generation_config is before
    cache_inits.clear()
    generated(wrapped)
    assert not cache_inits


def test_an_eager_variant_is_eager(model):
    before = model.generation_config
    fusedops.low_latency(model)
    eager = variant("eager", "generate").model(model)
    assert (type(eager.generation_config), eager.generation_config) == (type(before), before)
    assert model.generation_config.cache_implementation == "static"
    fusedops.unpatch(nn.ModuleList([model]))
    assert model.generation_config is before


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
