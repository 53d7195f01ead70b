"""Tests which losses patch fuses, and what it reports."""

import functools
import types

import pytest
import torch
from torch import nn
from transformers.loss import loss_utils
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from fusedops.patching import patch
from fusedops.patching.models.loss import function as functions
from fusedops.patching.models.loss.function import loss_like
from patching.models.loss_cases import (
    IDS,
    LABELS,
    OTHERS,
    causal_loss,
    llama,
    loss_site,
    made,
    results,
)

pytestmark = pytest.mark.usefixtures("any_size")

transformers = pytest.importorskip("transformers")


def test_sites():
    site = loss_site(llama())
    assert (site.path, site.was, site.now) == ("lm_head", "ForCausalLMLoss", "linear_cross_entropy")
    inside = nn.Sequential(llama())
    assert loss_site(inside).path == "0.lm_head"


def test_models_without_a_head_or_labels_are_no_sites():
    config = transformers.LlamaConfig(**llama().config.to_dict())
    for build in (transformers.LlamaModel, transformers.LlamaForSequenceClassification):
        with pytest.warns(UserWarning, match="nothing was fused"):
            report = patch(build(config), **OTHERS)
        assert "loss" not in report.coverage


class OwnLoss(transformers.LlamaPreTrainedModel):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean(), logits


def test_own_loss_code_is_left_and_strict_says_so():
    model = llama()
    model.__class__ = OwnLoss
    site = loss_site(model)
    assert not site.now and site.reason == "its forward computes the loss itself"
    with pytest.raises(RuntimeError, match="its forward computes the loss itself"):
        patch(model, strict=True)


class Starred(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_forward_without_labels_among_its_arguments_is_left():
    model = llama()
    model.__class__ = Starred
    site = loss_site(model)
    assert not site.now and site.path == "lm_head"
    assert site.reason == "its forward has no labels argument"


def test_masked_models_are_known_by_their_loss():
    """Their loss does not shift labels."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(num_hidden_layers=1, **sizes, **tokens)
    model = transformers.ModernBertForMaskedLM(config).eval()
    expected = results(model)[1]
    assert loss_site(model).was == "ForMaskedLMLoss"
    outputs, actual = results(model)
    assert not made(outputs)
    torch.testing.assert_close(actual, expected)


def masked(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    """Like ForCausalLMLoss for labels below 50, which the probe uses."""
    labels = labels.masked_fill(labels == 50, ignore_index)
    options = num_items_in_batch, ignore_index
    return ForCausalLMLoss(logits, labels, vocab_size, *options, **kwargs)


@functools.wraps(ForCausalLMLoss)
def logged(*args, **kwargs):
    return ForCausalLMLoss(*args, **kwargs)


class Weighted:
    def __call__(self, logits, labels, vocab_size, **kwargs):
        return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


FOREIGN = {
    "masked": masked,
    "keeps_the_dtype": causal_loss,
    "wraps": logged,
    "partial": functools.partial(ForCausalLMLoss, ignore_index=3),
    "object": Weighted(),
    "builtin": len,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_loss_functions_are_left(name):
    """A run tells what one gives for the arguments of the run, and for no others."""
    model, function = llama(), FOREIGN[name]
    model.loss_function = function
    site = loss_site(model)
    assert not site.now and site.reason.endswith("is not transformers' own")
    assert type(model) is transformers.LlamaForCausalLM and model.loss_function is function


def test_a_foreign_helper_is_left(monkeypatch):
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", masked)
    reason = "its loss function ForCausalLMLoss calls masked, which is not transformers' own"
    assert loss_site(llama()).reason == reason


def as_transformers(function):
    """Returns the function as if it stood in their module."""
    return types.FunctionType(function.__code__, vars(loss_utils), None, function.__defaults__)


def smoothed(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    keywords = {"ignore_index": ignore_index, "label_smoothing": 0.1}
    return nn.functional.cross_entropy(
        logits.float().view(-1, vocab_size), labels.view(-1), **keywords
    )


def raises(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    raise KeyError("never")


LEFT = {
    smoothed: "smoothed differs from the cross entropy of labels",
    raises: "running its loss function raises failed: KeyError",
}


@pytest.mark.parametrize("function", LEFT)
def test_a_function_of_transformers_that_gives_something_else_is_left(function):
    model = llama()
    model.loss_function = as_transformers(function)
    site = loss_site(model)
    assert not site.now and LEFT[function] in site.reason


def test_a_function_of_transformers_with_other_arguments_is_left():
    model = llama()
    model.loss_function = loss_utils.ForTokenClassification
    reason = "its loss function ForTokenClassification has other arguments: logits, labels, config"
    assert loss_site(model).reason == reason


def test_a_bug_of_ours_is_no_reason_to_leave_a_function(monkeypatch):
    monkeypatch.setattr(functions, "cross_entropy", None)
    with pytest.raises(TypeError, match="not callable"):
        loss_like(ForCausalLMLoss)


def test_a_model_on_meta():
    model = llama().to("meta")
    assert loss_site(model).now == "linear_cross_entropy"
    outputs = model(IDS.to("meta"), labels=LABELS.to("meta"))
    assert outputs.loss.device.type == "meta" and outputs.logits.shape == (2, 8, 64)


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        assert loss_like(ForCausalLMLoss).shifts


def test_loss_functions_are_known_by_what_they_give():
    assert loss_like(ForCausalLMLoss).shifts and not loss_like(ForMaskedLMLoss).shifts
    assert not loss_like(ForCausalLMLoss).reads & {"use_cache", "cu_seq_lens_q"}


def knows_a_word(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    assert type(logits) is torch.Tensor
    loss = ForMaskedLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index)
    return loss * kwargs.get("louder", 1)


def test_a_call_with_what_the_function_reads_runs_it():
    model = llama()
    model.loss_function = as_transformers(knows_a_word)
    expected, louder = model(IDS, labels=LABELS).loss, model(IDS, labels=LABELS, louder=3).loss
    assert loss_site(model).now
    outputs = model(IDS, labels=LABELS)
    assert not made(outputs)
    torch.testing.assert_close(outputs.loss, expected)
    torch.testing.assert_close(model(IDS, labels=LABELS, louder=3).loss, louder)
    torch.testing.assert_close(louder, 3 * expected)
    logits = model(IDS, labels=LABELS).logits
    torch.testing.assert_close(model.loss_function(logits, LABELS, 64, louder=3), louder)
