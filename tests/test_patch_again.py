"""A report that is looked at again: whose forward runs by now."""

import functools
import types

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from loss_cases import IDS, LABELS, llama
from torch import nn

import fusedops
from fusedops.functional import cross_entropy, linear_cross_entropy
from fusedops.patching.again import look_again
from fusedops.patching.instance import instead
from fusedops.patching.loss import function as losses
from fusedops.patching.loss import head as heads


def method(module, function):
    module.forward = types.MethodType(function, module)


def another_norm(self, hidden_states):
    return hidden_states


class Callable:
    """As accelerate's conversion to float32: an object that holds the forward that it calls."""

    def __init__(self, run):
        self.run = run

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


def closure(run):
    def forward(*args, **kwargs):
        return run(*args, **kwargs)

    return forward


WRAPPERS = {
    "closure": closure,
    "object": Callable,
    "partial": lambda run: functools.partial(run),
    "several": lambda run: closure(Callable(functools.partial(closure(run)))),
    "autocast": lambda run: torch.autocast("cpu", enabled=False)(run),
    "wraps": lambda run: functools.wraps(run)(closure(run)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_that_calls_the_forward_changes_nothing(wrapper):
    model = llama()
    report = fusedops.patch(model)
    before = str(report)
    for module in [*model.modules()]:
        if "norm" in type(module).__name__.lower() or module is model:
            module.forward = WRAPPERS[wrapper](module.forward)
    assert not look_again(model, report) and str(report) == before
    fused = heads.linear_cross_entropy
    assert count(heads, fused, lambda: model(IDS, labels=LABELS)) == 1


def count(home, function, run):
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, function.__name__, counted)
        run()
    return len(calls)


def test_hooks_of_accelerate_change_nothing_but_the_loss():
    """They put a forward on every module; on the head's the logits are made."""
    model = llama()
    report = fusedops.patch(model)
    for module in [*model.modules()]:
        add_hook_to_module(module, ModelHook())
    assert look_again(model, report) and not report.skipped
    (loss,) = (site for site in report.fused if site.kind == "loss")
    assert (loss.now, loss.reason) == ("cross_entropy", "of logits: something watches the head")
    assert not count(heads, linear_cross_entropy, lambda: model(IDS, labels=LABELS))
    assert not look_again(model, report)


def test_a_module_whose_forward_was_replaced_is_left():
    model = llama()
    report = fusedops.patch(model)
    fused = report.coverage["norm"]
    norm = model.model.layers[1].input_layernorm
    method(norm, another_norm)
    assert look_again(model, report)
    assert report.coverage["norm"] == (fused[0] - 1, fused[1])
    (site,) = report.skipped
    assert (site.kind, site.path) == ("norm", "model.layers.1.input_layernorm")
    assert site.reason == f"another_norm of {__name__} runs instead of its forward"
    assert not look_again(model, report)


def test_a_forward_with_a_head_of_its_own_is_named_when_patched_too():
    """It calls the model's as well, as TRL's does."""
    model = llama()
    original = model.forward

    def forward(self, *args, fused_head=False, **kwargs):
        if not fused_head:
            return original(*args, **kwargs)
        return self.lm_head(self.model(*args, **kwargs).last_hidden_state)

    method(model, forward)
    report = fusedops.patch(model)
    (site,) = (site for site in report.skipped if site.kind == "loss")
    reason = f"forward of {__name__} runs instead of its forward, with a head of its own"
    assert (site.path, site.reason) == ("lm_head", reason)


def test_a_forward_that_asks_the_model_for_its_loss_has_ours_of_logits():
    """When patched, and when looked at again."""

    def forward(self, ids, labels):
        logits = self.lm_head(self.model(ids).last_hidden_state)
        return self.loss_function(logits=logits, labels=labels, vocab_size=64)

    model, again = llama(), llama()
    method(model, forward)
    report, before = fusedops.patch(model), fusedops.patch(again)
    method(again, forward)
    assert look_again(again, before)
    for one, of in ((model, report), (again, before)):
        (site,) = (site for site in of.fused if site.kind == "loss")
        assert site.now == "cross_entropy" and site.reason.startswith("of logits: ")
        assert count(losses, cross_entropy, lambda: one(IDS, LABELS)) == 1  # noqa: B023
        assert "keep_logits" not in str(of)


def test_what_is_no_python_function_is_named_by_its_type():
    module = nn.Identity()
    module.forward = torch.relu
    assert str(instead(module)) == "a builtin_function_or_method runs instead of its forward"


def test_a_site_that_moved_stays_as_it_was():
    """PEFT puts adapters around modules."""
    model = llama()
    report = fusedops.patch(model)
    before = str(report)
    inner = model.model.layers
    model.model.layers = nn.ModuleList([nn.Sequential(layer) for layer in inner])
    assert not look_again(model, report) and str(report) == before
