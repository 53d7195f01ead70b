"""Fused experts under PEFT's LoRA on 3-D parameters, and under FSDP2."""

import pytest
import torch
from axes import grid
from children import on_ranks

from fusedops.patching import patch, unpatch
from fusedops.patching.core.config import gate_of

transformers = pytest.importorskip("transformers")
from patching.models.experts_cases import ALONE, build, ids, results  # noqa: E402

PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(name):
    """A model with LoRA on both weights of its experts, none of whose factors is zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_parameters=PARAMETERS, init_lora_weights=False)
    model = build(name)
    torch.manual_seed(4)
    return peft.get_peft_model(model, config).eval()


def fused(model):
    assert patch(model, **ALONE).coverage == {"experts": (2, 2)}
    return model


@grid(name=["qwen3_moe", "gpt_oss"])
def test_lora_on_the_weights(name):
    """Adapters' gradients, merged weights and disabled adapters are the unpatched model's."""
    unpatched, model = adapted(name), fused(adapted(name))
    expected, actual = results(unpatched), results(model)
    trained = [key for key in expected if "lora" in key]
    assert len(trained) == 8 and expected.keys() == actual.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, msg=lambda m, key=key: key + m)
    assert any(not torch.equal(actual[key], expected[key]) for key in expected)  # another code ran
    with torch.no_grad():
        for change in ("merge_adapter", "unmerge_adapter"):
            for each in (unpatched, model):
                getattr(each, change)()
            logits = (each(input_ids=ids()).logits for each in (model, unpatched))
            torch.testing.assert_close(*logits)
        with model.disable_adapter(), unpatched.disable_adapter():
            plain = model(input_ids=ids()).logits
            torch.testing.assert_close(plain, unpatched(input_ids=ids()).logits)
        assert not torch.allclose(plain, actual["logits"])


def test_lora_around_a_patched_model_and_unpatch():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_parameters=PARAMETERS, init_lora_weights=False)
    before = results(adapted("qwen3_moe"))
    base = fused(build("qwen3_moe"))
    torch.manual_seed(4)
    model = peft.get_peft_model(base, config).eval()
    assert sum(gate_of(m) is not None for m in model.modules()) == 2
    torch.testing.assert_close(results(model), before)
    unpatch(model)
    after = results(model)
    assert all(torch.equal(after[key], before[key]) for key in before)


SHARDED = "sharded_after_patch", "sharded_before_patch"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What both ranks print."""
    done = on_ranks("sharded_experts", 2, SHARDED, tmp_path_factory.mktemp("ranks"))
    return [rank.stdout + rank.stderr for rank in done]


@pytest.mark.parametrize("case", SHARDED)
def test_fsdp2(case, two_ranks):
    for text in two_ranks:
        assert case in text.splitlines(), text[-4000:]
