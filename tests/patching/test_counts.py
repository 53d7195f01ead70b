"""PatchReport.counts counts each fused site's kernel calls and fallbacks, and changes nothing."""

import copy
import gc
import pickle
import random
import sys

import pytest
import torch
from torch import nn

import fusedops
from fusedops import patch, unpatch
from fusedops.patching import CallCounts
from fusedops.patching.core.calls import BY_SIZE, FLOAT64, CallWatch

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

LAYERS = 2
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": LAYERS}


def llama(**more):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **more)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids(), "labels": ids()}


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), {"input_ids": ids()}


def ids():
    return torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def by_place(counts):
    return {(site.path, site.kind): site for site in counts.sites}


def numbers(site):
    return site.kernel, site.fallback, site.backward_kernel, site.backward_fallback


KERNEL, TORCH, NOT_CALLED = (1, 0, 1, 0), (0, 1, 0, 1), (0, 0, 0, 0)


def test_every_site_of_a_llama_runs_its_kernel(any_size):
    model, batch = llama()
    report = patch(model)
    counts = report.counts(batch)
    sites = by_place(counts)
    assert list(sites) == list(dict.fromkeys((s.path, s.kind) for s in report.fused))
    sum_norms = {(s.path, "norm") for s in report.fused if s.kind == "residual"}
    not_called = sum_norms | {("lm_head", "linear")}
    assert {place for place, site in sites.items() if numbers(site) == NOT_CALLED} == not_called
    assert {numbers(s) for place, s in sites.items() if place not in not_called} == {KERNEL}
    assert counts.kernel == len(sites) - len(not_called) and counts.fallback == 0
    assert counts.reasons == {}


def test_small_attention_falls_back_with_its_reason():
    model, batch = llama()
    counts = patch(model).counts(batch)
    for layer in range(LAYERS):
        site = by_place(counts)[f"model.layers.{layer}.self_attn", "attention"]
        assert numbers(site) == TORCH and site.reasons == {BY_SIZE: 1}
    assert counts.fallback == LAYERS and counts.reasons == {BY_SIZE: LAYERS}


def test_a_bert_counts_activated_linears_and_sums_of_other_shapes(any_size):
    model, batch = bert()
    sites = by_place(patch(model).counts(batch))
    sums = sites["bert.embeddings.LayerNorm", "residual"]
    assert numbers(sums) == TORCH
    assert sums.reasons == {"the operands' shapes or devices differ": 1}
    assert numbers(sites["bert.embeddings.LayerNorm", "norm"]) == KERNEL
    activated = sites["bert.encoder.layer.0.intermediate.dense", "linear"]
    assert activated.now == "linear(activation='gelu')" and numbers(activated) == KERNEL


def test_a_hook_makes_one_layer_fall_back(any_size):
    """The sum's layer runs its own lines, whose norm is called as a module and runs its kernel."""
    model, batch = llama()
    report = patch(model)
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda *_: None)
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    sites = by_place(report.counts(batch))
    path = "model.layers.1.post_attention_layernorm"
    assert sites[path, "residual"].reasons == {"its norm has hooks": 1}
    assert numbers(sites[path, "residual"]) == TORCH
    assert numbers(sites[path, "norm"]) == KERNEL
    mlp = sites["model.layers.1.mlp", "mlp"]
    assert numbers(mlp) == TORCH and "its activation has hooks" in next(iter(mlp.reasons))
    assert numbers(sites[path.replace("1", "0"), "residual"]) == KERNEL


def test_an_activated_linear_with_a_hook_is_one_call(any_size):
    model, batch = bert()
    report = patch(model)
    model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(lambda *_: None)
    site = by_place(report.counts(batch))["bert.encoder.layer.0.intermediate.dense", "linear"]
    assert numbers(site) == TORCH and site.reasons == {"the linear has hooks": 1}


def test_float64_runs_no_kernel(any_size):
    model, batch = llama()
    report = patch(model)
    counts = report.counts(batch)
    model.double()
    after = report.counts(batch)
    assert counts.fallback == 0 and after.kernel == 0
    sites = by_place(after)
    assert sites["model.layers.0.self_attn.q_proj", "linear"].reasons == {FLOAT64: 1}
    assert "its dtype is not float32" in next(iter(sites["model.layers.0.mlp", "mlp"].reasons))
    assert {site.backward_kernel for site in after.sites} == {0}


def test_a_forced_reference_is_no_kernel(any_size):
    model, batch = llama()
    report = patch(model)
    with fusedops.backend("reference"):
        counts = report.counts(batch)
    assert counts.kernel == 0 and "the backend 'reference' is forced" in counts.reasons


def test_checkpointed_layers_count_their_second_forward(any_size):
    model, batch = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    sites = by_place(patch(model).counts(batch))
    assert numbers(sites["model.layers.0.mlp", "mlp"]) == (2, 0, 1, 0)
    assert numbers(sites["model.norm", "norm"]) == KERNEL


def test_a_frozen_model_has_no_backward(any_size):
    model, batch = llama()
    report = patch(model.requires_grad_(False))
    assert numbers(by_place(report.counts(batch))["model.norm", "norm"]) == (1, 0, 0, 0)


def test_a_quantized_model(any_size):
    model, batch = llama()
    report = patch(model, quantize="int8")
    site = by_place(report.counts(batch))["model.layers.0.mlp.up_proj", "quantize"]
    assert site.kernel == 1 and site.backward_kernel == 1


class Flat(nn.Module):
    """A module that is called twice in a forward, and that takes two positional arguments."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.norms = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()

    def forward(self, x, y):
        random.random()
        return self.norms(self.norm(x)) + self.drop(self.norm(y))


@pytest.mark.parametrize("kind", [tuple, list])
def test_positional_arguments_and_restored_state(kind):
    model = Flat().train()
    report = patch(model)
    model.norm.weight.grad = gradient = torch.randn(8)
    kept = [t.clone() for t in (*model.parameters(), *model.buffers(), gradient)]
    inputs = kind(torch.randn(2, 4, 8).unbind())
    given = [x.clone() for x in inputs]
    states = torch.get_rng_state(), random.getstate(), sys.getprofile()
    counts = report.counts(inputs)
    assert numbers(by_place(counts)["norm", "norm"]) == (2, 0, 2, 0)
    after = [*model.parameters(), *model.buffers(), gradient]
    assert all(map(torch.equal, kept, after)) and model.norm.weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert sys.getprofile() is states[2] and model.training
    assert all(map(torch.equal, inputs, given))


def test_a_tensor_within_no_grad_and_inference_mode():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))
    report = patch(model)
    with torch.no_grad():
        assert numbers(by_place(report.counts(torch.randn(4, 8)))["0", "norm"]) == KERNEL
        assert not torch.is_grad_enabled()


def test_a_call_in_inference_mode_is_seen():
    model = nn.Sequential(nn.LayerNorm(8))
    patch(model)
    with torch.inference_mode(), CallWatch() as watch:
        model(torch.randn(4, 8))
    assert [(call.kind, call.kernel) for call in watch.calls] == [("norm", True)]


def test_the_modules_of_two_models_are_told_apart():
    first, second = (nn.Sequential(nn.LayerNorm(8)) for _ in range(2))
    report = patch(first)
    patch(second)
    assert report.counts(torch.randn(4, 8)).kernel == 1


@pytest.mark.parametrize("batch", [3, "text", None, {1, 2}])
def test_a_batch_of_another_type(batch):
    report = patch(nn.Sequential(nn.LayerNorm(8)))
    message = "counts: batch must be a dict of keyword arguments, a tuple or list .*, got "
    with pytest.raises(TypeError, match=message + type(batch).__name__):
        report.counts(batch)


def test_what_the_model_raises_leaves_it_as_it_was():
    model = Flat()
    report = patch(model)
    kept = [t.clone() for t in model.buffers()]
    with pytest.raises(RuntimeError, match="normalized_shape"):
        report.counts((torch.randn(4, 8), torch.randn(4, 7)))
    assert all(map(torch.equal, kept, model.buffers())) and sys.getprofile() is None
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_report_without_its_model():
    model = nn.Sequential(nn.LayerNorm(8))
    report = patch(model)
    for other in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert other == report and str(other) == str(report)
        with pytest.raises(RuntimeError, match="needs the report that patch returned, not a copy"):
            other.counts(torch.randn(4, 8))
    unpatch(model)
    with pytest.raises(RuntimeError, match="counts: the model is no longer patched"):
        report.counts(torch.randn(4, 8))
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="the model that patch was given no longer exists"):
        report.counts(torch.randn(4, 8))


def test_the_table_folds_layers_and_names_reasons():
    model, batch = llama()
    counts = patch(model).counts(batch)
    assert isinstance(counts, CallCounts)
    lines = str(counts).splitlines()
    assert lines[0] == f"fusedops.patch  {counts.kernel} calls by kernels, 2 by torch's code"
    attention = next(line for line in lines if line.startswith("attention"))
    assert "model.layers.0-1.self_attn" in attention and attention.endswith(f"1 x {BY_SIZE}")
    within = next(line for line in lines if "0-1.post_attention_layernorm" in line)
    assert within.startswith("norm") and within.endswith("within its residual")


def test_another_profile_function_runs_too():
    model, events = nn.Sequential(nn.LayerNorm(8)), []
    report = patch(model)

    def other(frame, event, arg):
        events.append(event)

    sys.setprofile(other)
    try:
        counts = report.counts(torch.randn(4, 8))
        assert sys.getprofile() is other
    finally:
        sys.setprofile(None)
    assert counts.kernel == 1 and {"call", "return"} <= set(events)


def test_a_device_without_kernels():
    """The kernel's operator is called there too, and only makes empty outputs."""
    model = nn.Sequential(nn.LayerNorm(8)).to("meta")
    (site,) = patch(model).counts(torch.randn(4, 8, device="meta")).sites
    assert numbers(site) == TORCH and site.reasons == {"there is no kernel for meta": 1}
