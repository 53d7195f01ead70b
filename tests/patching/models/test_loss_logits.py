"""A patched model's lazy logits, computed when read, equal the original's or raise an error."""

import copy
import functools
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from axes import grid
from torch import nn

from fusedops.optim import AdamW
from fusedops.patching.models.loss import logits as logits_module
from fusedops.patching.models.loss.logits import SCOPE, LazyLogits, formula, read
from patching.models.loss_cases import (
    IDS,
    LABELS,
    biased,
    cohere,
    gemma2,
    gradients,
    llama,
    made,
    patched,
)

pytestmark = pytest.mark.usefixtures("any_size")

CHANGED = "head's weight or input changed after the forward, before outputs.logits was read"


class Scaled(torch.autograd.Function):
    """A tenth of the gradient comes through. hand_on: what it does to hand the values on."""

    @staticmethod
    def forward(ctx, x, hand_on):
        return hand_on(x)

    @staticmethod
    def backward(ctx, grad):
        return 0.1 * grad, None


class Same(torch.autograd.Function):
    """As DDP and ZeRO-3 put one on a module's outputs. hand_on: what it does to hand them on."""

    @staticmethod
    def forward(ctx, x, hand_on):
        return hand_on(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


CALL = {"labels": LABELS, "vocab_size": 64}


def loss_of(model, logits):
    return model.loss_function(logits=logits, **CALL)


def lazy(build=llama, dtype=torch.float32):
    outputs = patched(build().to(dtype))(IDS, labels=LABELS)
    assert not made(outputs)
    return outputs


def plain(build=llama):
    return build()(IDS, labels=LABELS).logits


def at_rest():
    """Returns an evaluation's lazy logits and plain logits."""
    with torch.no_grad():
        return lazy().logits, plain()


READS = {
    "index": lambda t: t[0, 1],
    "argmax": lambda t: t.argmax(-1),
    "numpy": lambda t: torch.tensor(t.numpy()),
    "asarray": lambda t: torch.tensor(np.asarray(t)),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "dlpack": torch.from_dlpack,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "view": lambda t: t.view(-1, 64),
    "cat": lambda t: torch.cat([t, t]),
    "cpu": lambda t: t.cpu().clone(),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "double": lambda t: t.double(),
    "bfloat16": lambda t: t.bfloat16(),
    "int": lambda t: t.int(),
    "rows": lambda t: torch.stack(list(t)),
    "softmax": lambda t: F.softmax(t.float(), -1),
    "greater": lambda t: t > 0,
    "item": lambda t: torch.tensor(t[0, 0, 0].item()),
    "memory": lambda t: torch.tensor(t.untyped_storage().nbytes()),
    "storage": lambda t: torch.tensor(t.storage().tolist()),
    "text": lambda t: torch.tensor([ord(c) for c in f"{t} {t!r}"]),
    "compiled": torch.compile(lambda t: t.float().exp() * 2, backend="aot_eager"),
    "vmap": lambda t: torch.vmap(lambda row: row.sum())(t),
}


@pytest.mark.parametrize("read", READS)
def test_reads(read):
    ours, theirs = at_rest()
    assert torch.equal(READS[read](ours), READS[read](theirs))


def test_what_asks_for_no_values():
    outputs, theirs = lazy(), plain()
    ours = outputs.logits
    assert isinstance(ours, torch.Tensor) and torch.is_tensor(ours)
    for of in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_leaf"):
        assert getattr(ours, of) == getattr(theirs, of)
    assert (len(ours), ours.numel(), ours.stride()) == (2, theirs.numel(), theirs.stride())
    assert ours.is_contiguous() and ours.contiguous() is ours and ours.float() is ours
    assert not made(outputs)


def test_torch_save():
    ours, theirs = at_rest()
    file = io.BytesIO()
    torch.save({"logits": ours}, file)
    file.seek(0)
    loaded = torch.load(file)["logits"]
    assert type(loaded) is torch.Tensor and torch.equal(loaded, theirs)


def test_a_gradient_refuses_what_it_refuses_of_any_tensor():
    ours, theirs = lazy().logits, plain()
    for run in (copy.deepcopy, lambda t: t.numpy()):
        with pytest.raises(RuntimeError) as torch_error:
            run(theirs)
        with pytest.raises(RuntimeError) as our_error:
            run(ours)
        assert str(our_error.value) == str(torch_error.value)


def written(t):
    t.mul_(2)
    return t


def a_row_written(t):
    t[0] = 0
    return t


def a_view_written(t):
    t.view(-1, 64)[3].mul_(3)
    return t


def copied_then_written(t):
    kept = t.double()
    t.mul_(5)
    return t.double() + kept


def a_clone_written(t):
    return written(Same.apply(t, torch.clone)) + t


GRADIENTS = {
    "a clone in place": a_clone_written,
    "square": lambda t: t.square(),
    "in float32": lambda t: t.float().exp(),
    "in place": written,
    "a row in place": a_row_written,
    "a view in place": a_view_written,
    "after a copy": copied_then_written,
    "handed on": lambda t: Same.apply(t, torch.detach).exp(),
    "cloned": lambda t: Same.apply(t, torch.clone).exp(),
    "viewed": lambda t: Same.apply(t, lambda t: t.view_as(t)).exp(),
    "handed on and written": lambda t: written(Same.apply(t, torch.clone)).exp(),
    "computed in a function": lambda t: Same.apply(t, lambda t: t * 1.0).exp(),
    "a slice": lambda t: t[..., :10].exp(),
    "itself": lambda t: t,
}


@grid(build=[llama, biased, gemma2, cohere], what=GRADIENTS)
def test_gradients(what, build):
    model = build()

    def run():
        logits = model(IDS, labels=LABELS).logits
        result = GRADIENTS[what](logits)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
        return [result.detach(), gradients(model, (result * weights).sum())]

    expected = run()
    patched(model)
    torch.testing.assert_close(run(), expected)


def test_what_modules_around_do_to_hand_them_on_reads_nothing():
    for hand_on in (torch.detach, torch.clone, lambda t: t.view_as(t)):
        logits = Same.apply(lazy().logits, hand_on)
        assert not logits.state.cell and logits.requires_grad
    outputs = lazy()
    assert not outputs.logits.bfloat16().state.cell and not made(outputs)


def test_a_function_without_a_frame_is_found_by_its_context(monkeypatch):
    """Since torch 2.14 `apply` is C: only the forward's frame is there."""
    monkeypatch.setattr(logits_module, "APPLY", None)
    test_what_modules_around_do_to_hand_them_on_reads_nothing()


def test_what_a_user_keeps_is_read():
    """Otherwise the optimizer's step would lose it."""
    model = patched(llama())
    outputs = [model(IDS, labels=LABELS).logits for _ in range(5)]
    kept = [outputs[0].detach(), outputs[1].clone()]
    with torch.no_grad():
        kept += [outputs[2].detach(), outputs[3].clone(), outputs[4].double()]
    nn.init.zeros_(model.lm_head.weight)
    assert all(torch.equal(t.detach().float(), plain().detach()) for t in kept)


def test_what_waits_in_a_models_forward():
    logits = lazy(dtype=torch.bfloat16).logits
    before = SCOPE.set((nn.Identity(),))
    for wait in (lambda t: 2 * t, lambda t: t / 3, torch.tanh, torch.clone, lambda t: t.view_as(t)):
        assert type(wait(logits)) is LazyLogits
    assert logits.view(-1, 64).shape == (16, 64) and type(logits * logits[0]) is torch.Tensor
    SCOPE.reset(before)


def test_scale_and_softcap_that_were_noted():
    logits = lazy(dtype=torch.bfloat16).logits
    before = SCOPE.set((nn.Identity(),))
    noted_formulas = {
        (None, None): logits.float(),
        (6.0, None): 3 * logits.float() * 2,
        (None, 4.0): (logits / 4).tanh() * 4,
        (2.0, 8.0): 8 * torch.tanh(logits / 4),
    }
    refused = logits.float().bfloat16(), logits.tanh().tanh(), -1 * logits, 0 * logits
    SCOPE.reset(before)
    assert [formula(noted) for noted in noted_formulas.values()] == list(noted_formulas)
    assert all(formula(noted) is None for noted in refused)


def test_reads_do_not_tie_the_values_to_a_graph():
    logits = lazy().logits
    first, second = read(logits), read(logits)
    assert first is not second and first.requires_grad and not logits.state.values().requires_grad


def test_hooks_and_retained_gradients():
    logits, seen = lazy().logits, []
    logits.register_hook(lambda g: seen.append(g.clone()))
    logits.retain_grad()
    (2 * logits).sum().backward()
    assert torch.equal(logits.grad, torch.full_like(logits.grad, 2)) and len(seen) == 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, AdamW])
def test_logits_of_weights_that_were_stepped_are_refused(optimizer):
    """They would otherwise be computed with the new weights."""
    model = patched(llama())
    steps = optimizer(model.parameters(), lr=1e-3)
    outputs = model(IDS, labels=LABELS)
    outputs.loss.backward()
    early = outputs.logits.argmax(-1)
    steps.step()
    assert torch.equal(outputs.logits.argmax(-1), early)  # they were read before
    outputs = model(IDS, labels=LABELS)
    outputs.loss.backward()
    steps.step()
    with pytest.raises(RuntimeError, match=CHANGED):
        outputs.logits.argmax(-1)


def a_row(head):
    head.weight[5] += 1


def an_element(head):
    head.weight[3, 7] = 1


def an_element_of_the_bias(head):
    head.bias[5] += 1


def unseen(head):
    head.weight.data.add_(1e-3)


@pytest.mark.parametrize("change", [a_row, an_element, an_element_of_the_bias, unseen])
def test_weights_that_changed(change):
    model = patched(biased())
    outputs = model(IDS, labels=LABELS)
    with torch.no_grad():
        change(model.lm_head)
    for run in (torch.sum, functools.partial(loss_of, model)):
        with pytest.raises(RuntimeError, match=CHANGED):
            run(outputs.logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_weights_of_another_dtype(dtype):
    model = patched(llama())
    outputs = model(IDS, labels=LABELS)
    model.to(dtype)
    with pytest.raises(RuntimeError, match=CHANGED):
        outputs.logits.sum()


def test_weights_of_another_dtype_than_autocast():
    model = biased().half()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(IDS, labels=LABELS)
        outputs = patched(model)(IDS, labels=LABELS)
        assert not made(outputs) and torch.equal(outputs.logits, expected.logits)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=0.02, atol=0)


def test_a_hidden_state_that_was_written():
    model = patched(llama().eval())
    with torch.no_grad():
        outputs = model(IDS, labels=LABELS, output_hidden_states=True)
        outputs.hidden_states[-1].zero_()
        with pytest.raises(RuntimeError, match=CHANGED):
            outputs.logits.sum()
        with pytest.raises(RuntimeError, match=CHANGED):
            loss_of(model, outputs.logits)


def test_a_hidden_state_that_was_written_in_inference_mode():
    """No version is counted there, and what was computed before stays."""
    model = patched(llama().eval())
    with torch.inference_mode():
        outputs = model(IDS, labels=LABELS, output_hidden_states=True)
        outputs.hidden_states[-1][0, 3] = 0
        torch.testing.assert_close(loss_of(model, outputs.logits), outputs.loss)
        assert not made(outputs) and torch.equal(outputs.logits, plain())


def test_weights_that_are_nan_have_logits():
    model = patched(llama())
    nn.init.constant_(model.lm_head.weight, torch.nan)
    assert model(IDS, labels=LABELS).logits.isnan().all()


def test_the_loss_of_logits_that_were_written():
    model = patched(llama())
    logits, plain_logits = model(IDS, labels=LABELS).logits, plain()
    for t in (logits, plain_logits):
        t.mul_(3)
    torch.testing.assert_close(loss_of(model, logits), loss_of(llama(), plain_logits))


def test_data_that_is_set():
    model, plain_logits = patched(llama()), plain()
    outputs = model(IDS, labels=LABELS)
    logits, kept = outputs.logits, Same.apply(outputs.logits, torch.detach)
    logits.data = 2 * plain_logits
    assert torch.equal(logits.detach(), 2 * plain_logits.detach())
    assert torch.equal(kept.detach(), plain_logits.detach())
    torch.testing.assert_close(loss_of(model, logits), loss_of(llama(), 2 * plain_logits))
    with pytest.raises(RuntimeError, match=r"float32 \[2, 8, 64\] like the logits, got .* \[8\]"):
        logits.data = torch.zeros(8)


# The loss of logits that are not the head's output alone.


HANDED_ON = {
    "viewed": lambda t: Scaled.apply(t, lambda t: t.view_as(t)),
    "itself": lambda t: Scaled.apply(t, lambda t: t),
    "detached": lambda t: Scaled.apply(t, torch.detach),
    "cloned": lambda t: Scaled.apply(t, torch.clone),
    "cast": lambda t: Scaled.apply(t, lambda t: t.to(torch.float64)).float(),
    "and cast": lambda t: Scaled.apply(t, torch.clone).double().float(),
}


class Custom(transformers.LlamaForCausalLM):
    """A model that changes its logits before the loss."""

    between = staticmethod(lambda logits: logits)

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return self.loss_function(logits=self.between(logits), labels=labels, vocab_size=64)


def custom(between):
    model = llama()
    model.__class__ = type("Custom", (Custom,), {"between": staticmethod(between)})
    return model


@pytest.mark.parametrize("name", HANDED_ON)
def test_the_loss_behind_an_autograd_function(name):
    model = llama()

    def run():
        return gradients(model, loss_of(model, HANDED_ON[name](model(IDS, labels=LABELS).logits)))

    expected = run()
    patched(model)
    torch.testing.assert_close(run(), expected)


@pytest.mark.parametrize("name", HANDED_ON)
def test_the_loss_behind_an_autograd_function_of_the_models_own(name):
    model = custom(HANDED_ON[name])
    expected = gradients(model, model(IDS, labels=LABELS))
    torch.testing.assert_close(gradients(patched(model), model(IDS, labels=LABELS)), expected)


@torch.no_grad()
def without_gradients(t):
    return t.detach()


@pytest.mark.parametrize("detach", [torch.detach, without_gradients, lambda t: 2 * t.detach()])
def test_the_loss_of_detached_logits_has_no_gradient(detach):
    model, inside = llama(), custom(detach)
    expected = loss_of(model, detach(model(IDS, labels=LABELS).logits))
    assert not expected.requires_grad
    patched(model), patched(inside)
    for loss in (loss_of(model, detach(model(IDS, labels=LABELS).logits)), inside(IDS, LABELS)):
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected)


def test_the_loss_of_logits_that_have_a_gradient_of_their_own():
    """The head gets none of that gradient."""
    leaves = []

    def leaf(logits):
        leaves.append(logits.detach().requires_grad_())
        return 2 * leaves[-1]

    model = custom(leaf)
    loss_of_leaf = model(IDS, LABELS)
    expected = torch.autograd.grad(loss_of_leaf, leaves[-1])
    loss = patched(model)(IDS, LABELS)
    assert not gradients(model, loss)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves[-1]), expected)


def test_inference_mode():
    with torch.inference_mode():
        ours = lazy().logits
    assert torch.equal(ours, plain().detach())
    ours = lazy().logits
    with torch.inference_mode():
        ours.sum()
    assert torch.autograd.grad(ours.view(-1, 64).square().sum(), ours)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_they_are_what_the_head_gives_under_autocast(dtype):
    model = llama()
    with torch.autocast("cpu", dtype):
        expected = model(IDS, labels=LABELS).logits
        outputs = patched(model)(IDS, labels=LABELS)
    assert not made(outputs) and outputs.logits.dtype == dtype
    assert torch.equal(outputs.logits.detach(), expected.detach())  # read outside
    down = torch.randn(expected.shape).to(dtype)
    want, got = (gradients(model, (t * down).sum()) for t in (expected, outputs.logits))
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)


def test_they_keep_no_other_logits():
    """Of a softcap in bfloat16, only what is read is made."""
    outputs = patched(gemma2().bfloat16())(IDS, labels=LABELS)
    steps = outputs.logits.state.steps
    assert [f.overloadpacket.__name__ for f, *_ in steps] == ["div", "tanh", "mul"]
    outputs.loss.backward()
    assert not made(outputs)
