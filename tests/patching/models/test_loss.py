"""Tests of patch's fused loss: arguments, gradients, hooks, transforms, copies and unpatching."""

import copy
import inspect
import pickle

import pytest
import torch
from axes import grid
from calling import Calls
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from fusedops.patching import patch, unpatch
from fusedops.patching.core.probing import OBSERVERS
from fusedops.patching.models.loss import function as functions
from fusedops.patching.models.loss import head as heads
from patching.models.loss_cases import (
    IDS,
    LABELS,
    biased,
    causal_loss,
    cohere,
    gemma2,
    gradients,
    in_float64,
    judge,
    llama,
    made,
    patched,
    results,
    several,
)

pytestmark = pytest.mark.usefixtures("any_size")

transformers = pytest.importorskip("transformers")

SHIFTED = torch.where(torch.arange(8) < 2, -100, IDS.flip(1))
CALLS = {
    "labels": {},
    "items": {"num_items_in_batch": 7},
    "items in a tensor": {"num_items_in_batch": torch.tensor(7)},
    "ignore_index": {"ignore_index": 5, "labels": IDS.masked_fill(IDS % 3 == 0, 5)},
    "shifted labels": {"shift_labels": SHIFTED},
    "shifted labels and items": {"shift_labels": SHIFTED, "num_items_in_batch": 3},
    "what nobody reads": {"position_of_the_moon": 3},
    "nothing ignored": {"labels": IDS},
}
KEPT = {"logits_to_keep": 5, "shift_labels": SHIFTED[:, -5:].contiguous()}


@pytest.fixture
def fused(recorded):
    """Records the names of the functions that a patched model calls."""
    calls = recorded(heads, "linear_cross_entropy", lambda *_, **options: "linear_cross_entropy")
    return recorded(functions, "cross_entropy", lambda *_, **options: "cross_entropy", into=calls)


def check(model, **call):
    """Checks loss and gradients against the unpatched model; returns the outputs."""
    eager = several(model, **call)
    with in_float64(model) as exact_model:
        exact = several(exact_model, **call)
    judge(several(patched(model), **call), eager, exact)
    return results(model, **call)[0]


@grid(dtype=[torch.float32, torch.bfloat16], build=[llama, biased, gemma2, cohere], call=CALLS)
def test_arguments_of_the_loss(call, build, dtype, fused):
    outputs = check(build().to(dtype), **CALLS[call])
    assert not made(outputs) and fused[-1] == "linear_cross_entropy"


@pytest.mark.parametrize("build", [llama, gemma2, cohere])
def test_some_positions_alone(build):
    assert not made(check(build(), **KEPT))


def test_labels_by_position_and_a_tuple():
    model, twin = llama(), patched(llama())
    at = list(inspect.signature(model.forward).parameters).index("labels")
    args = [IDS, *[None] * (at - 1), LABELS]
    expected = model(*args, return_dict=False)
    got = twin(*args, return_dict=False)
    assert isinstance(got, tuple) and len(got) == len(expected)
    torch.testing.assert_close(got[0], expected[0])
    assert not got[1].state.cell and torch.equal(got[1], expected[1])


def test_every_label_ignored():
    nothing = torch.full_like(IDS, -100)
    assert results(patched(llama()), labels=nothing)[0].loss.isnan()
    outputs, grads = results(patched(llama()), labels=nothing, num_items_in_batch=4)
    assert outputs.loss == 0 and not any(g.any() for g in grads.values())


def test_eval_without_gradients(fused):
    model = llama().eval()
    with torch.no_grad():
        expected = model(IDS, labels=LABELS)
        outputs = patched(model)(IDS, labels=LABELS)
        assert not made(outputs) and not outputs.loss.requires_grad
        torch.testing.assert_close(outputs.loss, expected.loss)
        assert torch.equal(outputs.logits, expected.logits)
    assert fused[-1] == "linear_cross_entropy"


def test_without_labels_logits_are_plain():
    model = patched(llama())
    assert type(model(IDS).logits) is torch.Tensor
    assert type(model(IDS, labels=None).logits) is torch.Tensor
    assert type(model.lm_head(torch.randn(2, 32))) is torch.Tensor


def test_generate():
    model, kwargs = llama().eval(), {"max_new_tokens": 5, "do_sample": False}
    before = model.generate(IDS, **kwargs)
    assert torch.equal(patched(model).generate(IDS, **kwargs), before)


def test_tied_weights():
    model = llama(tie_word_embeddings=True)
    assert not made(check(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("build", [llama, biased, gemma2, cohere])
def test_autocast(build):
    model = build()
    with in_float64(model) as exact_model:
        exact = several(exact_model)
    with torch.autocast("cpu", torch.bfloat16):
        eager, before = several(model), results(model)[0]
        ours, outputs = several(patched(model)), results(model)[0]
    judge(ours, eager, exact)
    assert outputs.logits.dtype == before.logits.dtype and not made(outputs)
    assert torch.equal(outputs.logits.detach(), before.logits.detach())


@pytest.mark.parametrize("build", [llama, gemma2, cohere])
def test_a_loss_of_the_users_own(build):
    """Logits that are read have ordinary gradients, in addition to the loss's."""
    model = build()

    def own(model, weight):
        outputs = model(IDS, labels=LABELS)
        more = outputs.logits.float().log_softmax(-1).square().mean()
        return gradients(model, weight * outputs.loss + more)

    for weight in (0, 1):
        expected = own(model, weight)
        patched(model)
        torch.testing.assert_close(own(model, weight), expected)
        unpatch(model)


def test_double_backward():
    model = llama(attn_implementation="eager")

    def twice(model, of):
        outputs = model(IDS, labels=LABELS)
        first = torch.autograd.grad(of(outputs), list(model.parameters()), create_graph=True)
        return gradients(model, sum(g.square().sum() for g in first))

    for of in (lambda o: o.loss, lambda o: o.logits.square().mean()):
        expected = twice(model, of)
        torch.testing.assert_close(twice(patched(model), of), expected)
        unpatch(model)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing(reentrant):
    model = llama().train()
    expected = results(model)[1]
    patched(model).gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(IDS, labels=LABELS, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


# What sees the model as it runs, and gets logits.


def test_hooks_on_the_head_see_logits(fused):
    model, seen = patched(llama()), []
    expected = results(llama())[1]
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(type(logits)))
    outputs, actual = results(model)
    assert seen == [torch.Tensor] and type(outputs.logits) is torch.Tensor
    assert fused[-1] == "cross_entropy"
    torch.testing.assert_close(actual, expected)


def test_a_hook_that_changes_logits():
    model, unpatched = patched(llama()), llama()
    for each in (model, unpatched):
        each.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    torch.testing.assert_close(results(model)[1], results(unpatched)[1])


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def test_other_watchers_get_plain_logits():
    for put in ("register_forward_pre_hook", "register_full_backward_hook"):
        model = patched(llama())
        getattr(model.lm_head, put)(lambda *_: None)
        assert type(model(IDS, labels=IDS).logits) is torch.Tensor
    for watching in (Watching(), forward_ad.dual_level()):
        with watching:
            assert type(patched(llama())(IDS, labels=IDS).logits) is torch.Tensor


def test_modes_that_only_observe_get_lazy_logits():
    observers = OBSERVERS.set(1)
    try:
        with Watching():
            outputs = patched(llama())(IDS, labels=IDS)
            outputs.loss.backward()
            assert not made(outputs)
            with Watching():  # the second one may change what it sees
                assert type(patched(llama())(IDS, labels=IDS).logits) is torch.Tensor
    finally:
        OBSERVERS.reset(observers)


def test_lazy_logits_on_meta():
    """Memory is planned there: a head that made logits would be planned too large."""
    model, ids = patched(llama().to("meta")), IDS.to("meta")
    mask = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device="meta")
    outputs = model(ids, labels=ids, attention_mask=mask)  # one of two dimensions would be read
    outputs.loss.backward()
    assert not made(outputs)
    assert all(p.grad.is_meta for p in model.parameters())


def test_compile():
    model = llama()
    expected = model(IDS, labels=LABELS).loss
    torch._dynamo.reset()
    compiled = torch.compile(patched(model), fullgraph=True, backend="aot_eager")
    outputs = compiled(IDS, labels=LABELS, use_cache=False)
    assert type(outputs.logits) is torch.Tensor
    torch.testing.assert_close(outputs.loss, expected)
    outputs.loss.backward()
    torch._dynamo.reset()


def test_export_and_trace():
    model = patched(llama(use_cache=False))
    step = Calls(lambda ids: model(ids, labels=ids).loss, model=model)
    expected = step(IDS)
    torch.testing.assert_close(torch.export.export(step, (IDS,)).module()(IDS), expected)
    torch.testing.assert_close(torch.jit.trace(step, (IDS,))(IDS), expected)


def test_functional_transforms(fused):
    """They run the model's own loss."""
    model = patched(llama(use_cache=False, attn_implementation="eager"))
    expected = results(model)[1]
    parameters = dict(model.named_parameters())
    del fused[:]

    def loss(parameters):
        call = {"input_ids": IDS, "labels": LABELS}
        return torch.func.functional_call(model, parameters, kwargs=call).loss

    actual = torch.func.grad(loss)(parameters)
    torch.testing.assert_close(actual, {n: g for n, g in expected.items() if n != "loss"})
    _, along = torch.func.jvp(
        loss, (parameters,), ({n: torch.ones_like(p) for n, p in actual.items()},)
    )
    assert not fused
    torch.testing.assert_close(along, sum(g.sum() for g in actual.values()), rtol=1e-3, atol=1e-4)


def test_functional_call_with_other_weights():
    model, other = patched(llama()), llama()
    weights = {name: 1.5 * p for name, p in model.named_parameters()}
    other.load_state_dict({name: p.detach() for name, p in weights.items()})
    call = {"input_ids": IDS, "labels": LABELS}
    outputs = torch.func.functional_call(model, weights, kwargs=call)
    expected = other(**call)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert not made(outputs) and torch.equal(outputs.logits, expected.logits)


# What is refused, and what runs as it was.


@pytest.mark.parametrize("odd", [IDS.int(), IDS.float(), IDS[:, :5]], ids=["int32", "float", "few"])
def test_what_the_model_refuses_stays_refused(odd):
    with pytest.raises((ValueError, RuntimeError, IndexError)) as theirs:
        llama()(IDS, labels=odd)
    with pytest.raises(theirs.type) as ours:
        patched(llama())(IDS, labels=odd)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("size", [32, 128])
def test_another_vocabulary_than_the_heads_is_refused(size):
    outputs = patched(llama())(IDS, labels=LABELS)
    call = {"logits": outputs.logits, "labels": LABELS, "vocab_size": size}
    with pytest.raises(ValueError, match="batch_size"):
        ForCausalLMLoss(**call)
    with pytest.raises(ValueError, match="batch_size"):
        patched(llama()).loss_function(**call)


def test_float64_runs_the_models_own_loss(fused):
    model = llama().double()
    expected = results(model)[1]
    patched(model)
    del fused[:]
    actual = results(model)[1]
    assert not fused and all(torch.equal(actual[name], g) for name, g in expected.items())


# What the model is before, beside and after.


def test_unpatch_gives_back_what_was(fused):
    model = llama()
    state, before = {**vars(model)}, results(model)[1]
    patched(model)
    results(model)
    assert vars(model) == state  # nothing hangs on the instance
    unpatch(model)
    del fused[:]
    outputs, after = results(model)
    assert all(torch.equal(after[name], g) for name, g in before.items()) and not fused
    assert type(outputs.logits) is torch.Tensor and model.loss_function is ForCausalLMLoss
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is nn.Linear


def test_unpatch_between_the_forward_and_the_read():
    model = patched(llama())
    outputs = model(IDS, labels=LABELS)
    unpatch(model)
    assert torch.equal(outputs.logits, model(IDS).logits)


def test_patching_twice_is_patching_once():
    model = llama()
    first = patch(model)
    classes = [type(m) for m in model.modules()]
    assert patch(model) == first and [type(m) for m in model.modules()] == classes
    patch(model, loss=False)
    assert not made(model(IDS, labels=LABELS))
    unpatch(model)
    assert type(model.lm_head) is nn.Linear


def test_only_this_instance():
    model, sibling = patched(llama()), llama()
    assert not made(model(IDS, labels=LABELS))
    assert type(sibling(IDS, labels=LABELS).logits) is torch.Tensor
    assert transformers.LlamaForCausalLM.loss_function is type(sibling).loss_function


def test_copies_and_pickles():
    model = patched(llama())
    expected = results(llama())[1]
    twin = copy.deepcopy(model)
    assert not made(twin(IDS, labels=LABELS))
    torch.testing.assert_close(results(twin)[1], expected)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is transformers.LlamaForCausalLM and type(loaded.lm_head) is nn.Linear
    assert type(loaded(IDS, labels=LABELS).logits) is torch.Tensor


def test_save_pretrained(tmp_path):
    model = patched(llama())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    torch.testing.assert_close(results(loaded)[1], results(model)[1])


def test_the_signature_stays():
    model = llama()
    before = inspect.signature(model.forward)
    assert inspect.signature(patched(model).forward) == before


def test_a_loss_function_that_the_user_sets_afterwards():
    model, seen = patched(llama()), []

    def own(logits, labels, vocab_size, **kwargs):
        seen.append(type(logits))
        return logits.float().mean()

    model.loss_function = own
    assert model(IDS, labels=LABELS).loss == model(IDS).logits.mean() and seen == [torch.Tensor]
    unpatch(model)
    assert model.loss_function is own


def test_a_new_head_gives_plain_logits(fused):
    model = patched(llama())
    model.resize_token_embeddings(70)
    outputs = model(IDS, labels=LABELS)
    assert type(outputs.logits) is torch.Tensor and fused[-1] == "cross_entropy"
    expected = causal_loss(outputs.logits, LABELS, 70)
    torch.testing.assert_close(outputs.loss, expected)


def test_a_head_that_no_longer_is_a_linear():
    model, unpatched = patched(llama()), llama()
    for each in (model, unpatched):
        torch.nn.utils.parametrizations.weight_norm(each.lm_head)
    outputs, actual = results(model)
    assert type(outputs.logits) is torch.Tensor
    torch.testing.assert_close(actual, results(unpatched)[1])


def test_verify():
    patch(gemma2().bfloat16(), verify={"input_ids": IDS, "labels": LABELS})


def test_verify_sees_a_wrong_loss(monkeypatch):
    run = heads.linear_cross_entropy
    monkeypatch.setattr(
        heads, "linear_cross_entropy", lambda *a, softcap, **options: run(*a, **options)
    )
    with pytest.raises(RuntimeError, match="beyond rounding in loss"):
        patch(gemma2(), verify={"input_ids": IDS, "labels": LABELS})
