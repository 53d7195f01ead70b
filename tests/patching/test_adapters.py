"""PEFT's adapters before and after quantize: training, merging, unmerging, saving and loading."""

import itertools
import warnings

import pytest
import torch
from axes import grid
from torch import nn

import fusedops
from fusedops import low_latency, patch, quantize
from fusedops.nn import QuantizedExperts, QuantizedLinear
from fusedops.nn.quantized_linear.codes import bytes_of
from patching.architectures import GPT, PLAIN

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

FORMATS = ("int8", "int4", "nf4", "fp8")
TINY = PLAIN | {"hidden_size": 64, "intermediate_size": 96}
IDS = torch.arange(14).view(2, 7)
BOTH, SQUARE = ["q_proj", "down_proj"], ["q_proj"]
RANDOM = {"init_weights": False}
LORA = {"target_modules": BOTH, "r": 4, "init_lora_weights": False}
METHODS = {
    "LoRA": lambda: peft.LoraConfig(**LORA),
    "DoRA": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "IA3": lambda: peft.IA3Config(
        target_modules=BOTH, feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "VeRA": lambda: peft.VeraConfig(target_modules=SQUARE, r=4, **RANDOM),
    "OFT": lambda: peft.OFTConfig(target_modules=BOTH, r=0, oft_block_size=8, **RANDOM),
}
OTHERS = {
    "trained tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 2]),
    "BOFT": lambda: peft.BOFTConfig(target_modules=BOTH, boft_block_size=8, **RANDOM),
    "LoHa": lambda: peft.LoHaConfig(target_modules=BOTH, r=4, **RANDOM),
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        target_modules=BOTH, init_r=4, target_r=2, total_step=9, init_lora_weights=False
    ),
    "HRA": lambda: peft.HRAConfig(target_modules=BOTH, r=4, **RANDOM),
    "SHiRA": lambda: peft.ShiraConfig(target_modules=BOTH, r=2, **RANDOM),
    "MiSS": lambda: peft.MissConfig(target_modules=BOTH, r=4, **RANDOM),
    "Bone": lambda: peft.MissConfig(target_modules=BOTH, r=8, init_weights="bat"),
    "HiRA": lambda: peft.HiraConfig(target_modules=BOTH, r=4, **RANDOM),
    "LNTuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}
NOT_MERGED = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16
    ),
    "Lily": lambda: peft.LilyConfig(target_modules=BOTH, r=4, stride_A=1, num_B=2),
}


def llama(dtype=torch.float32, **config):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | config)).eval().to(dtype)


def with_adapter(config, model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: fan_in_fan_out, tied weights
        model = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    with torch.no_grad():  # as if it was trained
        for p in model.parameters():
            if p.requires_grad:
                p += 0.02 * torch.randn_like(p)
    return model


def trained(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def logits(model):
    torch.manual_seed(0)  # some adapters draw at random
    return model(input_ids=IDS).logits


def codes(model):
    layers = (m for m in model.modules() if isinstance(m, QuantizedLinear))
    return [t.clone() for m in layers for t in m.quantized_weight.tensors().values()]


def equal(a, b):
    pairs = itertools.zip_longest(a, b)
    return all(torch.equal(bytes_of(x), bytes_of(y)) for x, y in pairs)


def error(a, b):
    return (a - b).norm() / b.norm()


def check_training(model):
    model.train().zero_grad()
    torch.manual_seed(0)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    model.eval()


def check_merging(model, format):
    before, beside = codes(model), logits(model)
    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        merged = logits(model)
        assert error(merged, beside) < (0.05 if format == "int8" else 0.5)
        model.unmerge_adapter()
        assert equal(codes(model), before) and torch.equal(logits(model), beside)
    alone = model.merge_and_unload(safe_merge=True)
    assert torch.equal(logits(alone), merged)
    assert any(type(module) is QuantizedLinear for module in alone.modules())


def check_saving(model, format, folder):
    model.save_pretrained(folder)
    base = llama(model.dtype)
    quantize(base, format)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, folder).eval()), logits(model))


def check_before_quantize(name, config, format, dtype):
    """Quantizes below an adapter and returns the model."""
    model = with_adapter(config(), llama(dtype))
    names, floats = trained(model), logits(model)
    report = quantize(model, format)
    assert trained(model) == names
    assert {site.path.rpartition(".")[2] for site in report.fused} <= {
        *("base_layer", "q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert len(report.fused) == 14
    assert error(logits(model), floats) < (0.05 if format == "int8" else 0.25)
    adapters = [
        site.path for site in report.skipped if site.reason == "it is part of a PEFT adapter"
    ]
    modules = model.named_modules(remove_duplicate=False)  # Lily's layers share adapters
    linears = [path for path, m in modules if type(m) is nn.Linear]
    assert adapters == [path for path in linears if "lm_head" not in path], name
    return model


@grid(name=METHODS, format=FORMATS, dtype=[torch.float32, torch.bfloat16])
def test_adapters_before_quantize(name, format, dtype, tmp_path):
    model = check_before_quantize(name, METHODS[name], format, dtype)
    check_training(model)
    check_saving(model, format, tmp_path)
    check_merging(model, format)


@grid(name=METHODS, format=FORMATS, dtype=[torch.float32, torch.bfloat16])
def test_adapters_after_quantize(name, format, dtype, tmp_path):
    base = llama(dtype)
    quantize(base, format)
    model = with_adapter(METHODS[name](), base)
    assert all("base_layer" not in path for path in trained(model))
    check_training(model)
    check_saving(model, format, tmp_path)
    check_merging(model, format)


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods(name, tmp_path):
    model = check_before_quantize(name, OTHERS[name], "int8", torch.float32)
    check_training(model)
    check_saving(model, "int8", tmp_path)
    check_merging(model, "int8")
    base = llama()
    quantize(base, "int8")
    model = with_adapter(OTHERS[name](), base)
    check_training(model)
    check_merging(model, "int8")


@pytest.mark.parametrize("name", NOT_MERGED)
def test_methods_that_are_never_merged(name, tmp_path):
    model = check_before_quantize(name, NOT_MERGED[name], "int8", torch.float32)
    check_training(model)
    check_saving(model, "int8", tmp_path)


def test_an_adapter_that_is_not_trained_stays_in_floats(tmp_path):
    """Loaded for inference, no linear requires gradients."""
    for name in ("LoRA", "p-tuning"):
        folder = tmp_path / name
        with_adapter((METHODS | NOT_MERGED)[name](), llama()).save_pretrained(folder)
        model = peft.PeftModel.from_pretrained(llama(), folder).eval()
        before = {n: p.clone() for n, p in model.named_parameters() if "base_layer" not in n}
        assert all("embedding" in path for path in trained(model))
        assert len(quantize(model, "nf4").fused) == 14
        after = dict(model.named_parameters())
        kept = {n: p for n, p in before.items() if "lora" in n or "prompt" in n}
        assert kept and all(torch.equal(after[n], p) for n, p in kept.items())


@pytest.mark.parametrize(
    "call", [lambda m: patch(m, quantize="nf4"), lambda m: low_latency(m, quantize="nf4")]
)
def test_patch_and_low_latency_leave_adapters(call):
    model = with_adapter(METHODS["LoRA"](), llama())
    names, floats = trained(model), logits(model)
    report = call(model)
    assert trained(model) == names and error(logits(model), floats) < 0.25
    reasons = {site.path: site.reason for site in report.skipped if site.kind == "quantize"}
    path = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"
    assert reasons[path] == "it is part of a PEFT adapter"


def test_modules_to_save_and_their_originals():
    config = peft.LoraConfig(**LORA, modules_to_save=["o_proj"])
    model = with_adapter(config, llama())
    names = trained(model)
    report = quantize(model, "int8")
    attention = model.base_model.model.model.layers[0].self_attn
    assert trained(model) == names and len(report.fused) == 14
    assert type(attention.o_proj.original_module) is QuantizedLinear
    assert type(attention.o_proj.modules_to_save["default"]) is nn.Linear
    check_training(model)
    alone = model.merge_and_unload()
    assert type(alone.model.layers[0].self_attn.o_proj) is nn.Linear


def test_modules_to_save_of_a_quantized_model_train_in_floats(tmp_path):
    config = peft.LoraConfig(**LORA, modules_to_save=["o_proj"])
    base = llama()
    quantize(base, "nf4")
    model = with_adapter(config, base)
    assert trained(model) == trained(with_adapter(config, llama()))
    attention = model.base_model.model.model.layers[0].self_attn
    assert type(attention.o_proj.original_module) is QuantizedLinear
    copy = attention.o_proj.modules_to_save["default"]
    assert type(copy) is nn.Linear and copy.weight.requires_grad
    check_training(model)
    before = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = llama()
    quantize(again, "nf4")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.equal(logits(again), before)
    assert trained(again) == []

    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].self_attn.o_proj) is nn.Linear
    merged.save_pretrained(tmp_path / "merged")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(loaded.eval()), logits(merged))


def test_the_new_classifier_of_a_quantized_model_trains():
    torch.manual_seed(0)
    config = transformers.BertConfig(**PLAIN)
    model = transformers.BertForSequenceClassification(config).eval().to(torch.bfloat16)
    quantize(model, "int8")
    adapter = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    model = peft.get_peft_model(model, adapter)
    copy = model.base_model.model.classifier.modules_to_save["default"]
    assert type(copy) is nn.Linear and copy.weight.dtype == torch.bfloat16
    model(input_ids=IDS, labels=torch.tensor([0, 1])).loss.backward()
    assert copy.weight.grad.any() and copy.bias.grad.any()


def test_quantized_experts_cannot_be_modules_to_save():
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TINY | sizes))
    quantize(model, "int8")
    with pytest.raises(ValueError, match=r"experts is a QuantizedExperts.*quantize's skip"):
        peft.get_peft_model(model, peft.LoraConfig(**LORA, modules_to_save=["mlp"]))


def test_the_head_below_an_adapter_is_a_head():
    config = transformers.BertConfig(**PLAIN, tie_word_embeddings=False)
    model = transformers.BertForMaskedLM(config)  # its head is cls.predictions.decoder
    model = with_adapter(peft.LoraConfig(r=4, target_modules=["query", "decoder"]), model)
    report = quantize(model, "int8")
    assert type(model.get_base_model().get_output_embeddings().base_layer) is nn.Linear
    path = "base_model.model.cls.predictions.decoder.base_layer"
    assert {s.path: s.reason for s in report.skipped}[path] == "'lm_head' is in skip"


def test_routers_below_adapters_and_adapted_experts_stay_in_floats():
    sizes = {
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    config = transformers.Qwen3MoeConfig(**TINY | sizes | {"num_key_value_heads": 4})
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for parameters, quantized in (([], 2), (experts, 0)):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config).eval()
        adapter = peft.LoraConfig(**LORA | {"target_modules": SQUARE}, target_parameters=parameters)
        model = with_adapter(adapter, model)
        names, floats = trained(model), logits(model)
        report = quantize(model, "int8")
        assert trained(model) == names and error(logits(model), floats) < 0.05
        assert sum(isinstance(m, QuantizedExperts) for m in model.modules()) == quantized
        reasons = {site.reason for site in report.skipped}
        assert ("PEFT's target_parameters adapt its float weight" in reasons) == (quantized == 0)
        check_training(model)

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(8, 4), nn.Linear(8, 8)
            self.config = type("Config", (), {"num_experts": 4})()

    model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["gate", "up"]), Routed())
    report = quantize(model, "int8")
    reasons = {site.path: site.reason for site in report.skipped}
    assert reasons["gate.base_layer"] == "it routes tokens to experts"
    assert [site.path for site in report.fused] == ["up.base_layer"]


def test_glora_needs_floats():
    config = peft.GloraConfig(target_modules=BOTH, r=4)
    model = with_adapter(config, llama())
    floats = logits(model)
    report = quantize(model, "int8")
    assert len(report.fused) == 10 and error(logits(model), floats) < 0.02
    assert "its GLoRA adapter computes with its float weight" in {s.reason for s in report.skipped}
    check_training(model)


class LowRank(nn.Module):
    """An adapter of nobody's library."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_what_somebody_trains_stays_in_floats():
    model = llama().requires_grad_(False)
    layer = model.model.layers[0]
    layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    layer.mlp.down_proj.requires_grad_(True)
    names = trained(model)
    report = quantize(model, "int8")
    assert trained(model) == names and len(names) == 3
    assert {site.reason for site in report.skipped if site.path in {n[:-7] for n in names}} == {
        "it is trained, unlike other linears, which are frozen"
    }
    assert type(layer.self_attn.q_proj.base) is QuantizedLinear and len(report.fused) == 13
    check_training(model)


def test_a_loaded_model_is_quantized_whole():
    """Its weights all require gradients, except what its constructor froze."""
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    assert any(not p.requires_grad for p in model.parameters())
    assert len(quantize(model, "int8").fused) == 16
    model = llama()
    assert len(quantize(model, "nf4", skip=("lm_head", "mlp")).fused) == 8
    assert len(quantize(model, "int8").fused) == 6  # a second format for the rest
    model = llama().requires_grad_(False)
    assert len(quantize(model, "int8").fused) == 14


@grid(size=[1e-3, 0.1], dtype=[torch.float32, torch.bfloat16], name=["LoRA", "DoRA", "OFT"])
def test_two_adapters_in_any_order(name, size, dtype):
    configs = {
        "LoRA": peft.LoraConfig(target_modules=BOTH, r=4),
        "DoRA": peft.LoraConfig(target_modules=BOTH, r=4, use_dora=True),
        "OFT": peft.OFTConfig(target_modules=BOTH, r=0, oft_block_size=8),
    }
    base = llama(dtype)
    quantize(base, "nf4")
    model = peft.get_peft_model(base, configs[name]).eval()
    model.add_adapter("other", configs[name])
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p += size * torch.randn_like(p) * (p.abs().mean() if p.any() else 1)
    before = codes(model)
    for order in (["default", "other"], ["other", "default"]):
        for safe in (False, True):
            model.merge_adapter(adapter_names=order, safe_merge=safe)
            model.unmerge_adapter()
            assert equal(codes(model), before)
            for adapter_name in order:
                model.merge_adapter(adapter_names=[adapter_name], safe_merge=safe)
            model.unmerge_adapter()
            assert equal(codes(model), before)


def test_an_adapter_is_trained_further_between_two_merges():
    base = llama()
    quantize(base, "nf4")
    model = with_adapter(METHODS["DoRA"](), base)
    before, results = codes(model), []
    for _ in range(3):
        model.merge_adapter()
        results.append(logits(model))
        model.unmerge_adapter()
        assert equal(codes(model), before)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


GPT2 = GPT | {"n_embd": 64}


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()


CONV1D = {
    "LoRA": lambda: peft.LoraConfig(
        target_modules=["c_attn", "c_proj"], init_lora_weights=False, fan_in_fan_out=True
    ),
    "DoRA": lambda: peft.LoraConfig(
        target_modules=["c_proj"], init_lora_weights=False, fan_in_fan_out=True, use_dora=True
    ),
    "IA3": lambda: peft.IA3Config(
        target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"],
        fan_in_fan_out=True, init_ia3_weights=False,
    ),
    "VeRA": lambda: peft.VeraConfig(
        target_modules=["attn.c_proj"], r=4, init_weights=False, fan_in_fan_out=True
    ),
}  # fmt: skip


@grid(name=CONV1D, format=["int8", "nf4"])
def test_adapters_of_conv1d(name, format):
    """attn.c_proj is square: a transposed change would fit it."""
    for first in (True, False):
        base = gpt2()
        if not first:
            quantize(base, format)
        model = with_adapter(CONV1D[name](), base)
        names, floats = trained(model), logits(model)
        if first:
            assert len(quantize(model, format).fused) == 8
            assert error(logits(model), floats) < (0.03 if format == "int8" else 0.3)
        assert trained(model) == names
        check_training(model)
        before, beside = codes(model), logits(model)
        for safe in (False, True):
            model.merge_adapter(safe_merge=safe)
            assert format != "int8" or error(logits(model), beside) < 0.05
            model.unmerge_adapter()
            assert equal(codes(model), before) and torch.equal(logits(model), beside)
        alone = model.merge_and_unload()
        assert format != "int8" or error(logits(alone), beside) < 0.05


def test_an_adapter_of_conv1d_survives_dequantize(tmp_path):
    gpt2().save_pretrained(tmp_path)
    config = fusedops.QuantizationConfig("int8")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, quantization_config=config)
    model = with_adapter(CONV1D["DoRA"](), base)
    beside = logits(model)
    base.dequantize()
    assert error(logits(model), beside) < 0.01
    assert error(logits(model.merge_and_unload()), beside) < 0.01
