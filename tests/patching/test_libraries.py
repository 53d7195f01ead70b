"""Patched models under PEFT, accelerate and FSDP2."""

import pytest
import torch
from axes import grid

import fusedops
from fusedops.patching import patch, unpatch
from patching.models.loss_cases import IDS, llama
from patching.test_model import llama_coverage


@pytest.fixture(autouse=True)
def everywhere(any_size):
    """Sites of any size are fused, on every machine."""


def test_peft():
    """LoRA around the model; a norm that is trained sits in a wrapper and is fused there."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["post_attention_layernorm"]
    )
    model = peft.get_peft_model(llama(), lora).eval()
    expected = model(input_ids=IDS).logits
    report = patch(model)
    assert report.coverage["norm"] == (7, 7)  # two of them twice: the original, the trained copy
    assert all("ModulesToSaveWrapper" in site.reason for site in report.skipped)
    assert {site.kind for site in report.skipped} == {"residual"}
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    unpatch(model)
    assert torch.equal(model(input_ids=IDS).logits, expected)


def test_peft_without_trained_norms_fuses_the_sums():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert patch(model).coverage == llama_coverage(2, adapters=4)


@grid("quantized", [False, True])
def test_peft_around_every_linear_leaves_gates_and_rotary_fused(quantized):
    """No child of an attention or an MLP is a linear then."""
    peft = pytest.importorskip("peft")
    model = llama()
    if quantized:
        fusedops.quantize(model, "nf4")
    lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).eval()
    expected = model(input_ids=IDS).logits
    coverage = patch(model).coverage
    assert {kind: coverage.get(kind) for kind in ("mlp", "rotary")} == dict.fromkeys(
        ("mlp", "rotary"), (2, 2)
    )
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)


def test_fsdp2_on_top(tmp_path):
    """fully_shard puts its subclass on a patched layer; unpatch disables our forward."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch without distributed")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = llama().eval()
        expected = model(IDS).logits
        patch(model)
        for part in [*model.model.layers, model]:
            dist.fsdp.fully_shard(part, mesh=mesh)
        torch.testing.assert_close(model(IDS).logits, expected)
        assert patch(model).coverage == llama_coverage(2)
        unpatch(model)
        assert torch.equal(model(IDS).logits, expected)
    finally:
        dist.destroy_process_group()
