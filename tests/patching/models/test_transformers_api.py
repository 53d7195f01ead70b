"""patch skips sites, with a reason, if transformers lacks an API that they need."""

import pytest
import torch
from axes import grid

from fusedops import patch, unpatch
from fusedops.patching.models.transformers_api import RELIANCES, missing_api
from patching.models.loss_cases import IDS, llama

transformers = pytest.importorskip("transformers")


def test_all_is_there():
    kinds = {r.kind for r in RELIANCES}
    assert kinds == {"attention", "experts", "loss"}
    assert {missing_api(kind) for kind in kinds} == {""}


def hide(monkeypatch, place, name):
    """Hides an API, as in a version that has it in another module."""
    monkeypatch.delattr(f"transformers.{place}.{name}")


@grid(
    "kind,place,name",
    [
        ("attention", "masking_utils", "sdpa_mask"),
        ("attention", "modeling_utils", "AttentionInterface"),
        ("attention", "integrations.sdpa_attention", "sdpa_attention_forward"),
        ("loss", "loss.loss_utils", "ForCausalLMLoss"),
    ],
)
def test_what_is_gone_is_the_reason(monkeypatch, kind, place, name):
    built = llama()
    with torch.no_grad():
        before = built(input_ids=IDS).logits
    hide(monkeypatch, place, name)
    report = patch(built)
    left = [site for site in report.skipped if site.kind == kind]
    reason = f"transformers {transformers.__version__} has no {place}.{name}, which patch relies on"
    assert left and {site.reason for site in left} == {reason}
    others = {"norm", "residual", "mlp", "rotary", "attention", "loss"} - {kind}
    assert others <= {site.kind for site in report.fused}
    unpatch(built)
    with torch.no_grad():
        assert torch.equal(built(input_ids=IDS).logits, before)


def test_a_parameter_that_is_gone_is_the_reason(monkeypatch):
    def older(module, query, key, value, mask):
        raise AssertionError

    monkeypatch.setattr("transformers.integrations.sdpa_attention.sdpa_attention_forward", older)
    (site,) = (s for s in patch(llama(num_hidden_layers=1)).skipped if s.kind == "attention")
    assert "has no attention_mask in integrations.sdpa_attention" in site.reason


def test_an_attribute_that_is_gone_is_the_reason(monkeypatch):
    built = llama()
    monkeypatch.delattr("transformers.modeling_utils.PreTrainedModel.loss_function")
    (site,) = (s for s in patch(built).skipped if s.kind == "loss")
    assert "has no modeling_utils.PreTrainedModel.loss_function" in site.reason
