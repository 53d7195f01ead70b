"""`look_again` updates patch's report after modules, forwards or settings of the model changed."""

import functools
import types
import weakref

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

import fusedops
from fusedops.functional import cross_entropy, linear_cross_entropy
from fusedops.patching.core.instance import instead
from fusedops.patching.models.loss import function as losses
from fusedops.patching.models.loss import head as heads
from fusedops.patching.patch import look_again
from patching.models.loss_cases import IDS, LABELS, llama


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


def in_a_container(held, *at):
    def forward(*args, **kwargs):
        return functools.reduce(lambda item, key: item[key], at, held)(*args, **kwargs)

    return forward


def weakly(run):
    return lambda *args, **kwargs: run()(*args, **kwargs)


def by_a_global(run):
    """Returns a forward that calls `run` through a helper in the same file."""
    SAVED.append(run)
    at = len(SAVED) - 1

    def forward(*args, **kwargs):
        return saved(at, *args, **kwargs)

    return forward


SAVED = []


def saved(at, *args, **kwargs):
    return SAVED[at](*args, **kwargs)


def by_an_attribute(run):
    """In a list that the module itself holds."""
    run.__self__.old = [run]
    return types.MethodType(lambda self, *args, **kw: self.old[0](*args, **kw), run.__self__)


def as_method(code):
    return lambda run: types.MethodType(code, run.__self__)


class Holder:
    def __init__(self, run):
        self.run = run

    def method(self, *args, **kwargs):
        return self.run(*args, **kwargs)


WRAPPERS = {
    "list": lambda run: in_a_container([run], 0),
    "dict of lists": lambda run: in_a_container({"old": [run]}, "old", 0),
    "weak": lambda run: weakly(weakref.WeakMethod(run)),
    "global": by_a_global,
    "attribute": by_an_attribute,
    "method": lambda run: Holder(run).method,
    "__class__": as_method(lambda self, *args, **kw: self.__class__.forward(self, *args, **kw)),
    "closure": closure,
    "object": Callable,
    "several": lambda run: closure(Callable(functools.partial(closure(run)))),
    "wraps": lambda run: functools.wraps(run)(closure(run)),
}


def patched_llama(loss=True, **config):
    model = llama(**config)
    return model, fusedops.patch(model, loss=loss)


def loss_of(report):
    (site,) = (site for site in report.fused if site.kind == "loss")
    return site


def assert_loss_of_logits(model, report, reason):
    """The report says why, logits are made, and another look changes nothing."""
    loss = loss_of(report)
    assert (loss.now, loss.reason) == ("cross_entropy", f"computed from logits: {reason}")
    assert count(losses, cross_entropy, lambda: model(IDS, labels=LABELS)) == 1
    assert not look_again(model, report)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_that_calls_the_forward_changes_nothing(wrapper):
    model, report = patched_llama()
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
    model, report = patched_llama()
    for module in [*model.modules()]:
        add_hook_to_module(module, ModelHook())
    assert look_again(model, report) and not report.skipped
    loss = loss_of(report)
    assert (loss.now, loss.reason) == ("cross_entropy", "computed from logits: the head has hooks")
    assert not count(heads, linear_cross_entropy, lambda: model(IDS, labels=LABELS))
    assert not look_again(model, report)


def test_a_module_whose_forward_was_replaced_is_left():
    model, report = patched_llama()
    fused = report.coverage["norm"]
    norm = model.model.layers[1].input_layernorm
    method(norm, another_norm)
    assert look_again(model, report)
    assert report.coverage["norm"] == (fused[0] - 1, fused[1])
    (site,) = report.skipped
    assert (site.kind, site.path) == ("norm", "model.layers.1.input_layernorm")
    assert site.reason == f"another_norm of {__name__} replaces its forward"
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
    reason = f"forward of {__name__} replaces its forward and uses its own head"
    assert (site.path, site.reason) == ("lm_head", reason)


def reads_the_dtype(model):
    """Beside the model's own forward, without a head of its own."""
    run = model.forward

    def forward(*args, **kwargs):
        outputs = run(*args, **kwargs)
        outputs["dtype"] = model.lm_head.weight.dtype
        return outputs

    model.forward = forward


@pytest.mark.parametrize("keeps", [True, "keep_logits"])
def test_a_wrapper_that_reads_the_head_may_have_one_of_its_own(keeps):
    model, report = patched_llama(loss=keeps)
    reads_the_dtype(model)
    assert look_again(model, report)
    loss = loss_of(report)
    may = f"forward of {__name__} may compute the loss with its own head"
    assert loss.now == "linear_cross_entropy" and loss.reason.endswith(may)
    assert loss.reason.startswith("keep_logits") == (keeps == "keep_logits")
    assert count(heads, linear_cross_entropy, lambda: model(IDS, labels=LABELS)) == 1
    assert not look_again(model, report)


def by_its_type(self, *args, **kwargs):
    return type(self).forward(self, *args, **kwargs)


def by_its_name(self, *args, **kwargs):
    return transformers.LlamaForCausalLM.forward(self, *args, **kwargs)


@pytest.mark.parametrize("function", [by_its_type, by_its_name, reads_the_dtype])
def test_a_forward_without_a_head_of_its_own_has_the_loss_of_logits(function):
    """It was there before patch."""
    model = llama()
    function(model) if function is reads_the_dtype else method(model, function)
    report = fusedops.patch(model)
    assert_loss_of_logits(model, report, "the model has its own forward")


def test_the_forward_from_before_patch_is_not_the_fused_one():
    model = llama()
    report, norm = fusedops.patch(model), model.model.norm
    unfused = transformers.models.llama.modeling_llama.LlamaRMSNorm.forward
    norm.forward = functools.partial(unfused, norm)
    method(model, by_its_name)
    assert look_again(model, report)
    (left,) = report.skipped
    reason = "forward of transformers.models.llama.modeling_llama replaces its forward"
    assert (left.path, left.reason) == ("model.norm", reason)
    assert_loss_of_logits(model, report, f"by_its_name of {__name__} replaces its forward")


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
    for looked_at, model_report in ((model, report), (again, before)):
        site = loss_of(model_report)
        assert site.now == "cross_entropy" and site.reason.startswith("computed from logits: ")
        assert count(losses, cross_entropy, lambda: looked_at(IDS, LABELS)) == 1  # noqa: B023
        assert "keep_logits" not in str(model_report)


def test_what_is_no_python_function_is_named_by_its_type():
    module = nn.Identity()
    module.forward = torch.relu
    assert str(instead(module)) == "a builtin_function_or_method replaces its forward"


# What was fused and is not any more.


def reasons(report, kind):
    return {site.reason for site in report.skipped if site.kind == kind}


def test_an_attention_that_was_set_since():
    model, report = patched_llama()
    assert report.coverage["attention"] == (2, 2)
    model.set_attn_implementation("eager")
    assert look_again(model, report) and report.coverage["attention"] == (0, 2)
    assert reasons(report, "attention") == {"the implementation was set to eager after patch"}
    assert len(report.skipped) == 2
    assert not look_again(model, report)


def test_weights_that_are_wanted_since():
    model, report = patched_llama(attn_implementation="eager")
    assert not look_again(model, report)
    model.config.output_attentions = True
    assert look_again(model, report)
    reason = "output_attentions was set after patch, so attention weights are needed"
    assert reasons(report, "attention") == {reason}


def test_a_model_that_is_unpatched():
    model, report = patched_llama()
    fused = len(report.fused)
    fusedops.unpatch(model)
    assert look_again(model, report) and not report.fused
    assert len(report.skipped) == fused and "keep_logits" not in str(report)
    assert {site.reason for site in report.skipped} == {"it is no longer fused"}


def test_quantized_layers_stay():
    model = llama(vocab_size=256, hidden_size=256, intermediate_size=256)
    report = fusedops.patch(model, quantize="int8")
    quantized = report.coverage["quantize"]
    fusedops.unpatch(model)
    assert quantized[0] and look_again(model, report)
    assert report.coverage["quantize"] == quantized and len(report.fused) == quantized[0]


def test_modules_that_were_replaced():
    """A new head has the loss of logits."""
    model, report = patched_llama()
    model.model.norm, model.lm_head = nn.RMSNorm(32), nn.Linear(32, 64, bias=False)
    assert look_again(model, report)
    left = {(s.path, s.reason) for s in report.skipped}
    assert ("model.norm", "it is no longer fused") in left
    assert {path for path, _ in left} <= {"model.norm", "lm_head"}
    assert_loss_of_logits(model, report, "the head is no longer fused")


def test_another_loss_function():
    model, report = patched_llama()
    model.loss_function = lambda logits, *args, **kwargs: logits.sum()
    assert look_again(model, report) and report.coverage["loss"] == (0, 1)
    assert reasons(report, "loss") == {"another loss_function was set after patch"}
    assert not count(heads, linear_cross_entropy, lambda: model(IDS, labels=LABELS))


@pytest.mark.parametrize("calls", [False, True])
def test_a_class_on_top_with_a_forward_of_its_own(calls):
    model = llama()
    report, norm = fusedops.patch(model), model.model.norm

    class Top(type(norm)):
        def forward(self, x):
            return super().forward(x) if calls else x

    norm.__class__ = Top if calls else type("Top", (type(norm),), {"forward": another_norm})
    assert look_again(model, report) == (not calls)
    expected = set() if calls else {f"another_norm of {__name__} replaces its forward"}
    assert reasons(report, "norm") == expected


def test_a_site_that_moved_stays_as_it_was():
    """PEFT puts adapters around modules."""
    model, report = patched_llama()
    before = str(report)
    inner = model.model.layers
    model.model.layers = nn.ModuleList([nn.Sequential(layer) for layer in inner])
    assert not look_again(model, report) and str(report) == before
