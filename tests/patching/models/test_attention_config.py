"""A patched model's config behaves like an unpatched model's."""

import copy
import gc
import json
import operator
import pickle
from inspect import signature

import pytest
import torch
from axes import grid

from fusedops.patching import patch, unpatch
from fusedops.patching.core import config as views
from fusedops.patching.core.kinds import only
from fusedops.patching.core.swap import fused_class, fused_modules

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModel  # noqa: E402

from patching.models.attention_models import MODELS, batch, build  # noqa: E402

ALONE = only("attention")
NAMES = "llama", "bert", "t5", "vit", "whisper"
SITES = {"vit": 2} | {name: sites for name, (*_, sites) in MODELS.items()}
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 8}
VIT |= {"num_attention_heads": 4, "patch_size": 4}
pytestmark = pytest.mark.usefixtures("any_size")


def made(name, implementation="sdpa"):
    """Returns a model and a batch that it takes."""
    if name == "vit":
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)).eval()
        given = {"pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        model, given = build(name), batch(name)
    model.set_attn_implementation(implementation)
    return model, given


def fused(name, implementation="sdpa"):
    model, given = made(name, implementation)
    assert patch(model, **ALONE).coverage == {"attention": (SITES[name], SITES[name])}
    return model, given


def configs(model):
    """Yields the model's config, those in it, and those of its submodels."""
    yield from nested(model.config)
    models = (m for m in model.modules() if isinstance(m, transformers.PreTrainedModel))
    yield from (module.config for module in models)


def nested(config):
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            yield from nested(value)


def weights(outputs):
    """Returns the attention weights in a model's outputs, by their name."""
    return {k: list(v) for k, v in outputs.items() if "attentions" in k and v is not None}


# What is set in the config of a patched model.


@grid(in_every_config=[False, True], name=NAMES)
def test_weights_by_the_config(name, in_every_config, calls):
    """Of an encoder-decoder its stacks hold configs of their own."""
    (model, kwargs), (plain, _) = fused(name, "eager"), made(name, "eager")
    calls.clear()  # of the probe
    for each in (model, plain):
        for config in configs(each) if in_every_config else [each.config]:
            config.output_attentions = True
    outputs, expected = (weights(each(**kwargs)) for each in (model, plain))
    assert outputs.keys() == expected.keys() and (outputs or not in_every_config)
    torch.testing.assert_close(outputs, expected)
    assert not in_every_config or (sum(map(len, expected.values())) == SITES[name] and not calls)
    for config in configs(model):
        config.output_attentions = False
    assert not weights(model(**kwargs))
    assert len(calls) == SITES[name] * (1 if expected else 2)


@pytest.mark.parametrize("name", NAMES)
def test_weights_by_an_argument(name, calls):
    (model, kwargs), (plain, _) = fused(name, "eager"), made(name, "eager")
    calls.clear()
    outputs, expected = (weights(each(**kwargs, output_attentions=True)) for each in (model, plain))
    assert sum(map(len, expected.values())) == SITES[name] and not calls
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_sdpa_has_not(name):
    (model, _), (plain, _) = fused(name), made(name)
    messages = []
    for each in (model, plain):
        with pytest.raises(ValueError, match="attn_implementation") as raised:
            each.config.output_attentions = True
        messages.append(str(raised.value))
    assert messages[0] == messages[1] and "sdpa" in messages[0]
    assert not model.config.output_attentions


@grid(was=["sdpa", "eager"], name=NAMES)
def test_set_attn_implementation(name, was, calls):
    model, kwargs = fused(name, was)
    plain, _ = made(name, was)
    calls.clear()
    model(**kwargs)
    assert len(calls) == SITES[name]
    other = "eager" if was == "sdpa" else "sdpa"
    for implementation, ours in ((other, 0), (was, SITES[name]), (other, 0)):
        calls.clear()
        for each in (model, plain):
            each.set_attn_implementation(implementation)
        assert {config._attn_implementation for config in configs(model)} == {implementation}
        got, want = (each(**kwargs)[0] for each in (model, plain))
        assert len(calls) == ours
        torch.testing.assert_close(got, want, **({} if ours else {"rtol": 0, "atol": 0}))
    with pytest.raises(ValueError, match='Specified `attn_implementation="foo"` is not supported'):
        model.set_attn_implementation("foo")
    assert {config._attn_implementation for config in configs(model)} == {other}


def test_an_implementation_that_does_not_run_here():
    """The attentions read what is set, and set it back."""
    model, _ = fused("llama")
    reads = model.model.layers[0].self_attn.config
    for implementation, read in (("flash_attention_2", "flash_attention_2"), ("sdpa", "fusedops")):
        model.config._attn_implementation_internal = implementation
        assert (reads._attn_implementation, model.config._attn_implementation) == (
            read,
            implementation,
        )
    assert "self_attn" in patch(model, **ALONE).fused[0].path
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.warns(UserWarning, match="nothing was fused"):
        report = patch(model, **ALONE)
    assert {site.reason for site in report.skipped} == {
        "its implementation is set to flash_attention_2"
    }


def test_patched_anew_after_another_was_set(calls):
    model, kwargs = fused("llama", "eager")
    model.set_attn_implementation("sdpa")
    assert {site.was for site in patch(model, **ALONE).fused} == {"LlamaAttention/sdpa"}
    calls.clear()
    model(**kwargs)
    assert len(calls) == 2
    model.set_attn_implementation("eager")
    model(**kwargs)
    assert len(calls) == 2


# A second model, by the config of the first.


def again(model, tmp_path, route):
    cls, config = type(model), model.config
    if route == "class":
        return cls(config)
    if route == "_from_config":
        return cls._from_config(config)
    if route == "AutoModel":
        return AutoModel.from_config(config)
    if route == "deepcopy":
        return cls(copy.deepcopy(config))
    model.save_pretrained(tmp_path)
    if route == "config file":
        return AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    return cls.from_pretrained(tmp_path)


WAYS = "class", "_from_config", "AutoModel", "deepcopy", "config file", "from_pretrained"


@grid(route=WAYS, name=NAMES)
def test_a_second_model_runs_its_own_attention(name, route, tmp_path, calls):
    model, kwargs = fused(name)
    other = again(model, tmp_path, route).eval()
    calls.clear()
    other(**kwargs)
    assert not calls
    model(**kwargs)
    assert len(calls) == SITES[name]
    assert {config._attn_implementation for config in configs(other)} == {"sdpa"}


@grid(route=WAYS, name=["llama", "bert", "t5"])
def test_a_second_model_by_a_class_with_all_patched(name, route, tmp_path):
    """The model itself has another class too, because of its loss."""
    model, kwargs = made(name)
    plain = type(model)
    patch(model)
    assert type(model) is not plain
    other = again(model, tmp_path, route).eval()
    assert not fused_modules(other) and not any(fused_class(m) for m in other.modules())
    assert route in ("AutoModel", "config file") or type(other) is plain
    if route == "from_pretrained":
        torch.testing.assert_close(other(**kwargs)[0], model(**kwargs)[0])


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_a_second_module_by_a_class_with_all_patched(name):
    model, _ = made(name)
    patch(model)
    fused = {type(m) for m in fused_modules(model)}
    again = [cls(model.config) for cls in fused if [*signature(cls).parameters] == ["config"]]
    assert again and not any(map(fused_modules, again))


@grid(implementation=["sdpa", "eager"], name=NAMES)
def test_a_second_model_by_another_implementation(name, implementation, tmp_path):
    model, kwargs = fused(name, "eager" if implementation == "sdpa" else "sdpa")
    want = model(**kwargs)[0]
    model.save_pretrained(tmp_path)
    assert "fusedops" not in (tmp_path / "config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=implementation)
    torch.testing.assert_close(loaded(**kwargs)[0], want)
    built = type(model)._from_config(model.config, attn_implementation=implementation)
    for other in (loaded, built):
        assert {config._attn_implementation for config in configs(other)} == {implementation}


# The view that an attention holds.


@pytest.fixture
def view():
    """Returns the model, its config, and its first attention's view."""
    model, _ = fused("llama")
    return model, model.config, model.model.layers[0].self_attn.config


def test_a_view_shares_what_is_set(view):
    _, config, seen = view
    assert seen is not config and vars(seen) is vars(config) and seen == config and config == seen
    assert isinstance(seen, transformers.LlamaConfig) and type(seen).__name__ == "LlamaConfig"
    config.rms_norm_eps = 0.5
    seen.use_cache = False
    assert seen.rms_norm_eps == 0.5 and not config.use_cache
    seen.more = 3
    del seen.more
    assert not hasattr(config, "more")
    seen._attn_implementation = "eager"  # by its setter
    seen.output_attentions = True
    assert (config._attn_implementation, config.output_attentions) == ("eager", True)


def test_a_view_is_written_as_the_config(view, tmp_path):
    _, config, seen = view
    assert repr(seen) == repr(config) and seen.to_dict() == config.to_dict()
    seen.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    assert type(type(seen)()) is transformers.LlamaConfig
    both = pickle.loads(pickle.dumps([config, seen, config]))
    assert type(both[1]) is transformers.LlamaConfig and both[0] is both[1] is both[2]


def test_copies_of_a_view(view):
    """With its model, what is read stays ours; a copy of its own is a config."""
    model, _, seen = view
    assert type(copy.copy(seen)) is transformers.LlamaConfig
    assert copy.copy(seen)._attn_implementation == "sdpa"
    new = copy.deepcopy(model)
    copied = new.model.layers[0].self_attn.config
    assert copied._attn_implementation == "fusedops"
    assert vars(copied) is vars(new.config) is not vars(seen)


def test_a_view_changes_no_class(view):
    """transformers makes a dataclass of every subclass of a config's class."""
    _, _, seen = view
    attributes = vars(type(seen))
    assert "__init__" not in attributes and "__dataclass_fields__" not in attributes
    assert type(seen) is type(view[0].model.layers[1].self_attn.config)


def test_a_config_that_is_replaced_stays(view):
    model, config, _ = view
    other = copy.deepcopy(config)
    model.model.layers[0].self_attn.config = other
    unpatch(model)
    assert model.model.layers[0].self_attn.config is other
    assert model.model.layers[1].self_attn.config is config


def test_a_config_that_takes_no_view(monkeypatch):
    """Its class may come from any package."""

    def refuse(*_):
        raise TypeError("it is final")

    monkeypatch.setattr(views, "_class_of", refuse)
    model, _ = made("llama")
    with pytest.warns(UserWarning, match="nothing was fused"):
        report = patch(model, **ALONE)
    reason = "making a view of its config failed: TypeError: it is final"
    assert {site.reason for site in report.skipped} == {reason}


def test_a_view_is_freed_with_its_model():
    model, _ = fused("bert")
    cls = type(operator.attrgetter("bert.encoder.layer")(model)[0].attention.self.config)
    assert cls in views._classes.values()
    unpatch(model)
    del cls
    gc.collect()
    assert (transformers.BertConfig, "sdpa") not in views._classes
