"""patch(model, loss="keep_logits") keeps outputs.logits valid after the optimizer's step."""

import dataclasses
import inspect
import textwrap
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from axes import grid

import fusedops
from fusedops.optim import AdamW
from fusedops.patching import patch, patched, unpatch
from fusedops.patching.core import thresholds
from fusedops.patching.models.loss import head as heads
from fusedops.patching.models.loss import logits as logits_of
from fusedops.patching.models.loss.logits import LazyLogits
from patching.models.loss_cases import (
    IDS,
    LABELS,
    OTHERS,
    biased,
    cohere,
    gemma2,
    gradients,
    llama,
    loss_site,
    made,
    trainer,
)

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("any_size")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOTE = 'loss: read outputs.logits before optimizer.step(), or patch with loss="keep_logits"'
BUILDS = [llama, biased, gemma2, cohere]


def keeping(model):
    patch(model, **OTHERS, loss="keep_logits")
    return model


def stepped(model, optimizer=torch.optim.SGD):
    """Returns a step, and the outputs of its forward."""
    steps = optimizer(model.parameters(), lr=0.1)
    outputs = model(input_ids=IDS, labels=LABELS)
    outputs.loss.backward()
    steps.step()
    return outputs


@pytest.fixture
def losses(recorded):
    """Returns the calls of linear_cross_entropy by patched heads."""
    return recorded(heads, "linear_cross_entropy")


@grid(optimizer=[torch.optim.SGD, torch.optim.AdamW, AdamW], build=BUILDS)
def test_logits_first_read_after_the_step_are_the_forwards(build, optimizer, losses):
    with torch.no_grad():
        expected = build()(IDS, labels=LABELS).logits
    outputs = stepped(keeping(build()), optimizer)
    assert len(losses) == 1 and type(outputs.logits) is LazyLogits
    assert torch.equal(outputs.logits.detach(), expected)
    assert torch.equal(outputs.logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_16_bits(dtype, losses):
    model = llama().to(dtype)
    with torch.no_grad():
        expected = model(IDS, labels=LABELS).logits
    outputs = stepped(keeping(model))
    assert len(losses) == 1 and outputs.logits.dtype == dtype
    assert torch.equal(outputs.logits.detach(), expected)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_autocast(dtype, losses):
    model = llama()
    with torch.autocast("cpu", dtype), torch.no_grad():
        expected = model(IDS, labels=LABELS).logits
    keeping(model)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", dtype):
        outputs = model(IDS, labels=LABELS)
    outputs.loss.backward()
    steps.step()
    assert len(losses) == 1 and torch.equal(outputs.logits.detach(), expected)


@grid(dtype=DTYPES, build=BUILDS)
def test_losses_and_gradients_are_those_of_true(build, dtype):
    results = []
    for loss in (True, "keep_logits"):
        model = build().to(dtype)
        patch(model, **OTHERS, loss=loss)
        outputs = model(IDS, labels=LABELS)
        results.append([outputs.loss.detach(), gradients(model, outputs.loss)])
    assert results[0][1].keys() == results[1][1].keys()
    torch.testing.assert_close(*results, rtol=0, atol=0)


def entropy(logits):
    p = F.softmax(logits.float(), -1)
    return -(p * p.log()).sum(-1).mean()


@pytest.mark.parametrize("build", BUILDS)
def test_another_loss_of_the_logits_has_its_gradient(build):
    """Alone, and together with the model's loss."""
    for of in (
        lambda o: entropy(o.logits),
        lambda o: o.loss + 0.1 * entropy(o.logits),
        lambda o: entropy(2 * o.logits[:, -3:]),
    ):
        model = build()
        expected = gradients(model, of(model(IDS, labels=LABELS)))
        keeping(model)
        torch.testing.assert_close(gradients(model, of(model(IDS, labels=LABELS))), expected)


def test_a_gradient_through_the_logits_after_the_step_is_refused():
    """torch refuses it for every matmul whose weight was changed."""
    outputs = stepped(keeping(llama()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.logits.sum().backward()


def test_logits_that_are_written_to():
    model = keeping(llama())
    with torch.no_grad():
        outputs = model(IDS, labels=LABELS)
        outputs.logits.div_(2)
        assert torch.equal(outputs.logits, llama()(IDS, labels=LABELS).logits / 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode):
    model = keeping(llama().eval())
    with mode():
        outputs = model(IDS, labels=LABELS)
        expected = llama().eval()(IDS, labels=LABELS)
    model.lm_head.weight.data.zero_()
    assert torch.equal(outputs.logits, expected.logits)
    torch.testing.assert_close(outputs.loss, expected.loss)


def test_tuples():
    model = keeping(llama())
    _, logits, *_ = model(IDS, labels=LABELS, return_dict=False)
    assert logits.state.cell and torch.equal(logits, llama()(IDS, labels=LABELS).logits)


@dataclasses.dataclass
class Plain:
    """Outputs that torch's trees take for a leaf."""

    loss: torch.Tensor
    logits: object


class Hidden:
    __slots__ = ("logits", "loss")

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


def with_outputs_of(build, kind):
    """Returns a model whose forward hands its outputs on in an object of `kind`."""
    model = build()

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super(cls, self).forward(input_ids=input_ids, labels=labels, **kwargs)
        return kind(outputs.loss, outputs.logits)

    members = {"forward": forward, "__module__": type(model).__module__}
    cls = model.__class__ = type("Own", (type(model),), members)
    return model


KINDS = {"dataclass": Plain, "slots": Hidden, "list": lambda *both: Plain(both[0], [both[1]])}


@grid(kind=KINDS, build=BUILDS)
def test_outputs_of_any_class(build, kind, losses):
    with torch.no_grad():
        expected = build()(IDS, labels=LABELS).logits
    outputs = stepped(keeping(with_outputs_of(build, KINDS[kind])))
    logits = outputs.logits[0] if kind == "list" else outputs.logits
    assert len(losses) == 1 and type(logits) is LazyLogits
    assert torch.equal(logits.detach(), expected)


@pytest.mark.parametrize("build", BUILDS)
def test_only_the_outputs_logits_are_computed(build, recorded):
    """Not those before a softcap, nor a loss function's copy in float32."""
    seen = recorded(logits_of.State, "values", lambda state: state)
    outputs = keeping(build().bfloat16())(input_ids=IDS, labels=LABELS)
    assert set(seen) == {outputs.logits.state}


def test_a_forward_without_labels_is_the_models():
    logits = keeping(llama())(IDS).logits
    assert type(logits) is torch.Tensor and torch.equal(logits, llama()(IDS).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    def run(model):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        outputs = stepped(model)
        return outputs.logits.detach(), outputs.loss.detach(), [*model.parameters()]

    torch.testing.assert_close(run(keeping(llama())), run(llama()))


ADAPTERS = {
    "on the head": {"target_modules": ["q_proj", "lm_head"]},
    "elsewhere": {"target_modules": ["q_proj"]},
    "the head in full": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@grid(order=["before", "after"], which=ADAPTERS)
def test_adapters(which, order):
    def run(patches):
        model = llama()
        if patches and order == "before":
            keeping(model)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, **ADAPTERS[which]))
        if patches and order == "after":
            keeping(model)
        outputs = stepped(model)
        return outputs.loss.detach(), outputs.logits.detach(), [*model.parameters()]

    torch.testing.assert_close(run(True), run(False))


def test_the_logits_are_freed_with_the_outputs():
    """Neither the model nor the graph holds them."""
    model = keeping(llama())
    outputs = model(IDS, labels=LABELS)
    (values,) = outputs.logits.state.cell
    kept, loss = weakref.ref(values), outputs.loss
    del values, outputs
    assert kept() is None
    loss.backward()


def test_modes_replace_each_other():
    """Patching twice is patching once; leaving a block restores the previous mode."""
    model = llama()

    def kept():
        outputs = model(IDS, labels=LABELS)
        return bool(outputs.logits.state.cell) if type(outputs.logits) is LazyLogits else None

    patch(model, **OTHERS)
    assert kept() is False
    patch(model, **OTHERS, loss="keep_logits")
    assert kept() is True
    with patched(model, **OTHERS, loss=True):
        assert kept() is False
    assert kept() is True
    patch(model, **OTHERS)
    assert kept() is False
    patch(model, **OTHERS, loss="keep_logits")
    unpatch(model)
    assert kept() is None and type(model) is transformers.LlamaForCausalLM


def test_the_report_shows_the_mode():
    site = loss_site(llama(), loss="keep_logits")
    assert site.now == "linear_cross_entropy"
    assert site.reason == "keep_logits: the forward also computes the logits"
    assert loss_site(llama(), loss=True).reason == ""


def test_the_report_says_once_that_logits_are_read_early():
    assert patch(llama(), **OTHERS).notes == [NOTE] and str(patch(llama())).count(NOTE) == 1
    assert not patch(llama(), **OTHERS, loss="keep_logits").notes
    watched = llama()
    watched.forward = watched.forward  # logits are made
    assert not patch(watched, **OTHERS).notes
    assert NOTE not in patch(llama(), loss=False).notes


def test_the_error_names_the_mode():
    model = llama()
    patch(model, **OTHERS)
    outputs = stepped(model)
    with pytest.raises(
        RuntimeError,
        match='patch with loss="keep_logits", which computes the logits in the forward',
    ):
        outputs.logits.argmax(-1)


@pytest.mark.parametrize("loss", ["keep", "True", None, 1, 0, torch.tensor(True)], ids=str)
def test_other_values_are_refused(loss):
    model = llama()
    message = r"patch: loss must be True, False or 'keep_logits', got "
    with pytest.raises(ValueError, match=message):
        fusedops.patch(model, loss=loss, quantize="nf4")
    assert type(model.lm_head) is torch.nn.Linear
    assert not any(isinstance(m, fusedops.nn.QuantizedLinear) for m in model.modules())


def test_few_logits_are_made_once(monkeypatch):
    """In bfloat16 on a CPU the loss is computed from logits anyway."""
    monkeypatch.setattr(thresholds, "_always", False)
    outputs = stepped(keeping(llama().bfloat16()))
    assert made(outputs) and type(outputs.logits) is torch.Tensor


class Metrics:
    """A loop's accuracy, computed after the step; and what compute_metrics gets."""

    def __init__(self):
        self.seen = []

    def __call__(self, predictions):
        self.seen.append(predictions.predictions)
        return {"accuracy": float((predictions.predictions.argmax(-1) == 5).mean())}


def test_the_trainers_predictions(tmp_path):
    text = torch.tensor(list(inspect.getsource(textwrap).encode())) % 64
    rows = [{"input_ids": row, "labels": row} for row in text[: 8 * 16].view(8, 16)]

    def run(callbacks):
        metrics, options = Metrics(), {"per_device_train_batch_size": 4, "max_steps": 2}
        options |= {"eval_strategy": "steps", "eval_steps": 1}
        hf_trainer = trainer(llama(), tmp_path, rows, callbacks, metrics, **options)
        hf_trainer.train()
        return [*metrics.seen, hf_trainer.predict(rows).predictions]

    callback = fusedops.integrations.transformers.FusedOpsCallback(**OTHERS, loss="keep_logits")
    ours, theirs = run([callback]), run([])
    assert len(ours) == len(theirs) == 3
    for our_scores, their_scores in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our_scores, their_scores, rtol=1e-4, atol=1e-4)


def test_accuracy_in_a_training_loop():
    """Of several steps, computed when the weights are others already."""

    def run(model):
        steps = torch.optim.SGD(model.parameters(), lr=0.1)
        accuracies = []
        for _ in range(3):
            outputs = model(IDS, labels=LABELS)
            outputs.loss.backward()
            steps.step()
            steps.zero_grad()
            accuracies.append((outputs.logits[:, :-1].argmax(-1) == LABELS[:, 1:]).float().mean())
        return torch.stack(accuracies)

    assert torch.equal(run(keeping(llama())), run(llama()))
