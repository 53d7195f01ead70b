"""fusedops.quantize and from_pretrained quantize the experts of mixture-of-experts models."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from axes import grid
from children import TESTS

import fusedops
from fusedops.functional import dequantize_experts
from fusedops.nn import QuantizedExperts
from fusedops.patching.core.calls import CallWatch
from fusedops.patching.models.experts.site import is_experts
from fusedops.testing import yardstick

transformers = pytest.importorskip("transformers")
from fusedops.integrations.transformers import QuantizationConfig  # noqa: E402
from patching.models.experts_cases import ALONE, build, ids  # noqa: E402

NAMES = ["qwen3_moe", "mixtral", "gpt_oss"]


def expert_sites(report):
    return [s for s in [*report.fused, *report.skipped] if s.path.endswith("experts")]


def with_codes_as_floats(model, quantized):
    """A float64 copy of the model with the quantized experts' dequantized weights."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    for path, module in quantized.named_modules():
        if isinstance(module, QuantizedExperts):
            floats = exact.get_submodule(path)
            for name, stack in module.stacks().items():
                weight = dequantize_experts(stack.quantized_weight, torch.float64)
                weight = weight.transpose(1, 2) if floats.is_transposed else weight
                getattr(floats, name).data = weight.contiguous()
    return exact


@grid(name=NAMES, format=["int8", "nf4"])
def test_a_quantized_model_is_the_model_of_its_codes(name, format):
    model = build(name)
    quantized = copy.deepcopy(model)
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    report = fusedops.quantize(quantized, format, skip=linears, compute="exact")
    assert {(s.now, s.reason) for s in expert_sites(report)} == {
        (f"QuantizedExperts, {format}", "")
    }
    exact = with_codes_as_floats(model, quantized)
    eager = copy.deepcopy(exact).float()
    actual, *others = ({**results(m)} for m in (quantized, eager, exact))
    for key, value in actual.items():
        assert yardstick(value, *(other[key] for other in others)) is None, key


def results(model):
    out = model(input_ids=ids(), labels=ids(), use_cache=False)
    out.loss.backward()
    return {"logits": out.logits, "gradient": model.get_input_embeddings().weight.grad}


@grid("name,format", [*zip(NAMES, ["int8", "int4", "nf4"], strict=True), ("mixtral", "fp8")])
def test_from_pretrained_and_back(name, format, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "floats")
    fusedops.quantize(model, format)
    expected = model(input_ids=ids()).logits
    auto = transformers.AutoModelForCausalLM
    config = QuantizationConfig(format)
    loaded = auto.from_pretrained(tmp_path / "floats", quantization_config=config)
    assert torch.equal(loaded(input_ids=ids()).logits, expected)
    assert sum(isinstance(m, QuantizedExperts) for m in loaded.modules()) == 2
    loaded.save_pretrained(tmp_path / "codes")
    again = auto.from_pretrained(tmp_path / "codes")
    assert torch.equal(again(input_ids=ids()).logits, expected)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(again.generate(ids(5), **options), model.generate(ids(5), **options))
    loaded.dequantize()  # the config has the dtype's name since it was saved
    assert loaded(input_ids=ids()).logits.dtype == torch.float32


@grid(name=NAMES)
def test_dequantizing_gives_back_transformers_experts(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path, quantization_config=QuantizationConfig("nf4"))
    exact_model = with_codes_as_floats(model, loaded)
    loaded.dequantize()
    for path, module in model.named_modules():
        if is_experts(module):
            floats = loaded.get_submodule(path)
            assert type(floats) is type(module) and floats.config is loaded.config
            for key, p in exact_model.get_submodule(path).named_parameters():
                assert torch.equal(floats.get_parameter(key), p.float())
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for path in linears:
        exact_model.get_submodule(path).weight.data = loaded.get_submodule(path).weight.double()
    actual, exact = loaded(input_ids=ids()).logits, exact_model(input_ids=ids()).logits
    torch.testing.assert_close(actual, exact.float())
    assert fusedops.patch(loaded, **ALONE).coverage == {"experts": (2, 2)}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_checkpoint_without_one_of_the_weights(name, tmp_path):
    from safetensors.torch import load_file, save_file

    build(name).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {k: t for k, t in load_file(path).items() if not ("down" in k or ".w2." in k)}
    save_file(kept, path, {"format": "pt"})
    config = QuantizationConfig("nf4")
    with pytest.raises(ValueError, match=r"fusedops: the checkpoint has no .*experts\.down_proj"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_loading_takes_a_layer_of_floats_more_than_the_codes(tmp_path):
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # freed tensors go back at once
    command = [sys.executable, "-m", "children.loading_memory", str(tmp_path)]
    printed = subprocess.check_output(command, cwd=TESTS, env=env, text=True)
    peak, size, checkpoint, layer = json.loads(printed.splitlines()[-1])
    assert size < peak < size + layer < checkpoint


def test_quantizing_frees_each_weight():
    import weakref

    model = build("qwen3_moe")
    refs = [weakref.ref(p) for n, p in model.named_parameters() if ".experts." in n]
    fusedops.quantize(model, "nf4")
    assert len(refs) == 4 and all(ref() is None for ref in refs)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_patch_and_state_dict(name):
    model = build(name)
    floats = {k: v.clone() for k, v in model.state_dict().items()}
    fusedops.quantize(model, "int4")
    expected = model(input_ids=ids()).logits
    model.load_state_dict(floats)  # quantizes again
    assert torch.equal(model(input_ids=ids()).logits, expected)
    report = fusedops.patch(model, **ALONE | {"norm": True})
    assert "experts" not in report.coverage
    torch.testing.assert_close(model(input_ids=ids()).logits, expected, rtol=1e-3, atol=1e-3)
    assert model.bfloat16()(input_ids=ids()).logits.dtype == torch.bfloat16


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "_apply_gate")]


LEFT = {
    "it normalises each expert's result": lambda m: setattr(m, "has_post_expert_norm", True),
    "it has hooks": lambda m: m.register_forward_hook(lambda *a: None),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_says_why(reason):
    model = build("qwen3_moe", num_hidden_layers=1)
    LEFT[reason](experts_of(model)[0])
    assert [s.reason for s in expert_sites(fusedops.quantize(model, "int8"))] == [reason]


def test_counts_see_the_kernels():
    model = build("qwen3_moe")
    counted = fusedops.patch(model, quantize="nf4").counts({"input_ids": ids(), "labels": ids()})
    sites = [s for s in counted.sites if s.path.endswith("experts")]
    counts = [(s.kind, s.kernel, s.fallback, s.backward_kernel) for s in sites]
    assert counts == [("quantize", 1, 0, 1)] * 2
    with torch.inference_mode(), CallWatch() as watch:
        model(input_ids=ids())
    ran = [call for call in watch.calls if isinstance(call.module, QuantizedExperts)]
    assert [(call.kernel, call.reason) for call in ran] == [(True, "")] * 2


def test_skip_and_input_format_leave_experts():
    for options, reason in (
        ({"skip": ("experts",)}, "'experts' is in skip"),
        ({"input_format": "int8"}, "quantized experts take no input_format"),
    ):
        model = build("qwen3_moe", num_hidden_layers=1)
        assert [s.reason for s in expert_sites(fusedops.quantize(model, "int8", **options))] == [
            reason
        ]
