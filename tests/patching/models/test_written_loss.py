"""A cross entropy that a forward computes itself, of a head's output, needs no logits."""

import copy
import pickle
from typing import ClassVar

import pytest
import torch
import transformers
from axes import grid
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedops import patch, unpatch
from fusedops.patching.models.loss import head as heads
from fusedops.patching.models.loss.logits import LazyLogits
from fusedops.patching.patch import look_again
from patching.models.loss_cases import OTHERS, judge
from patching.quiet import quietly

N, CLASSES = 32, 64
DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(3, CLASSES, (8, 2, 8), generator=DRAW)
LABELS = torch.where(torch.rand(IDS.shape, generator=DRAW) < 0.4, IDS.flip(2), -1)
WEIGHT = torch.rand(CLASSES, generator=DRAW)


class Plain(nn.Module):
    """As nanoGPT. Its subclasses write the loss in other ways."""

    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(CLASSES, N), nn.LayerNorm(N)
        self.head = nn.Linear(N, CLASSES, bias=bias)

    def forward(self, ids, targets=None):
        x, loss = self.norm(self.table(ids)), None
        if targets is not None:
            logits = self.head(x)
            rows = logits.view(-1, logits.size(-1))
            loss = F.cross_entropy(rows, targets.view(-1), ignore_index=-1)
        else:
            logits = self.head(x[:, [-1], :])
        return logits, loss


class Shifted(Plain):
    def forward(self, ids, targets=None):
        logits = self.head(self.norm(self.table(ids)))
        loss = None
        if targets is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = targets[..., 1:].contiguous()
            loss_fct = CrossEntropyLoss(ignore_index=-1)
            loss = loss_fct(shift_logits.view(-1, CLASSES), shift_labels.view(-1))
        return logits, loss


class Reshaped(Plain):
    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids)))
        loss = F.cross_entropy(
            logits[:, 2:].reshape(-1, CLASSES), targets[:, 2:].reshape(-1), ignore_index=-1
        )
        return logits, loss


class Capped(Plain):
    """As nanochat, with the loss as a child."""

    def __init__(self, bias=False):
        super().__init__(bias)
        self.criterion = CrossEntropyLoss(ignore_index=-1)

    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids)))
        logits = 3 * torch.tanh(logits / 3)
        logits = logits.float()
        loss = self.criterion(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Biased(Plain):
    """As BART: a buffer is added to the logits."""

    def __init__(self, bias=False):
        super().__init__(bias)
        self.register_buffer("more", torch.linspace(-2, 2, CLASSES)[None])

    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids)))
        logits = logits + self.more.to(logits.device)
        return logits, nn.CrossEntropyLoss(ignore_index=-1)(
            input=logits.view(-1, CLASSES), target=targets.view(-1)
        )


class Trained(Plain):
    """As ESM: a parameter is added to the logits."""

    def __init__(self, bias=False):
        super().__init__(bias)
        self.more = nn.Parameter(torch.linspace(-2, 2, CLASSES))

    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids))) + self.more
        return logits, F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1), ignore_index=-1)


class Helped(Plain):
    """A method and a function between the forward and the call."""

    def forward(self, ids, targets):
        logits = self.table(ids)
        logits = self.norm(logits)
        logits = self.head(logits)
        return logits, self.loss(targets, logits=logits)

    def loss(self, targets, logits):
        assert CrossEntropyLoss
        return cross_entropy(logits, targets)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Padded(Plain):
    """As nanochat: the head has more rows than there are classes."""

    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids)))
        logits = logits[..., :60]
        targets = targets.clamp(max=59)
        return logits, F.cross_entropy(logits.view(-1, 60), targets.view(-1), ignore_index=-1)


class Options(Plain):
    """options: those of F.cross_entropy."""

    options: ClassVar[dict] = {}

    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids)))
        rows = logits.view(ids.numel(), -1)
        loss = F.cross_entropy(rows, targets.view(-1), ignore_index=-1, **self.options)
        return logits, loss.mean() if loss.dim() else loss


FORMS = {
    kind.__name__: kind
    for kind in (Plain, Shifted, Reshaped, Capped, Biased, Trained, Helped, Padded, Options)
}
OPTIONS = {
    "smoothing": {"label_smoothing": 0.1},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing of a sum": {"label_smoothing": 0.3, "reduction": "sum"},
    "weight": {"weight": WEIGHT},
    "weight and smoothing": {"weight": WEIGHT, "label_smoothing": 0.2},
}


def patched(model):
    report = patch(model, **OTHERS)
    assert [site.now for site in report.fused] == ["linear_cross_entropy"], str(report)
    return model


def results(model, ids, targets, lazy=None):
    logits, loss = model(ids, targets)
    if lazy is not None:
        assert type(logits) is (LazyLogits if lazy else torch.Tensor)
        assert not lazy or not logits.state.has_values
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    named = zip(parameters, grads, strict=True)
    return {"loss": loss.detach(), **{name: g for name, g in named if g is not None}}


def several(model, lazy=None):
    batches = [results(model, *pair, lazy) for pair in zip(IDS, LABELS, strict=True)]
    return {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}


def in_float64(model):
    exact = copy.deepcopy(model).double()
    if getattr(exact, "options", {}).get("weight") is not None:
        exact.options = {**exact.options, "weight": WEIGHT.to(model.head.weight.dtype).double()}
    return exact


def check(model, autocast=False):
    exact = several(in_float64(model))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        eager = several(model)
        judge(several(patched(model), lazy=True), eager, exact)
        (logits, _), (expected, _) = (m(IDS[0], LABELS[0]) for m in (model, unpatched(model)))
        assert torch.equal(logits.detach(), expected.detach()) and logits.dtype == expected.dtype


def unpatched(model):
    twin = copy.deepcopy(model)
    unpatch(twin)
    return twin


@pytest.mark.usefixtures("any_size")
@grid(form=FORMS, dtype=[torch.float32, torch.bfloat16], bias=[False, True])
def test_forms(form, dtype, bias):
    check(FORMS[form](bias).to(dtype))


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("form", sorted({*FORMS} - {"Trained"}))  # its gradient stays float32
def test_autocast(form):
    check(FORMS[form](), autocast=True)


@grid(name=OPTIONS, dtype=[torch.float32, torch.bfloat16], any_size=[False, True])
def test_arguments_of_the_loss(name, dtype, any_size, request):
    """Few logits in bfloat16 are computed, but only those of the labels that count."""
    if any_size:
        request.getfixturevalue("any_size")
    model = Options().to(dtype)
    model.options = {k: v.to(dtype) if k == "weight" else v for k, v in OPTIONS[name].items()}
    check(model)


@grid(dtype=[torch.float32, torch.bfloat16], form=FORMS)
def test_few_logits(dtype, form):
    check(FORMS[form]().to(dtype))


def test_few_logits_are_those_of_the_rows_that_count(recorded):
    calls = recorded(heads, "cross_entropy", lambda rows, *_, **options: len(rows))
    model = patched(Plain().bfloat16())
    results(model, IDS[0], LABELS[0], lazy=True)
    assert calls == [int((LABELS[0] != -1).sum())] and calls[0] < LABELS[0].numel()


@grid(dtype=[torch.float32, torch.bfloat16], reduction=["mean", "sum"])
def test_every_label_ignored(dtype, reduction):
    model, nothing = Options().to(dtype), torch.full_like(LABELS[0], -1)
    model.options = {"reduction": reduction}
    expected = results(model, IDS[0], nothing)
    actual = results(patched(model), IDS[0], nothing, lazy=True)
    assert expected["loss"].isnan() == actual["loss"].isnan() == (reduction == "mean")
    if reduction == "sum":
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_without_labels_logits_are_plain():
    model = patched(Plain())
    logits, loss = model(IDS[0])
    assert type(logits) is torch.Tensor and loss is None
    assert type(model.head(torch.randn(2, N))) is torch.Tensor
    assert type(model(ids=IDS[0], targets=LABELS[0])[0]) is LazyLogits


ODD = {
    "int32": lambda t: t.int(),
    "probabilities": lambda t: torch.rand(16, CLASSES, generator=torch.Generator().manual_seed(1)),
    "few": lambda t: t[:, :5].contiguous(),
    "out of range": lambda t: t + 100,
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_labels_do_what_they_did(odd):
    class AnyLabels(Plain):
        def forward(self, ids, targets):
            logits = self.head(self.norm(self.table(ids))).view(-1, CLASSES)
            targets = targets if targets.is_floating_point() else targets.view(-1)
            return logits, F.cross_entropy(logits, targets)

    model, targets = AnyLabels(), ODD[odd](IDS[0])
    try:
        expected = model(IDS[0], targets)[1]
    except (RuntimeError, ValueError, IndexError) as error:
        with pytest.raises(type(error)):
            patched(model)(IDS[0], targets)
    else:
        torch.testing.assert_close(patched(model)(IDS[0], targets)[1], expected)


def test_legacy_arguments_and_a_weight_that_trains():
    for options in ({"size_average": False}, {"reduce": False}, {"weight": WEIGHT.double()}):
        model = Options()
        model.options = options
        patched(model)
        try:
            expected = unpatched(model)(IDS[0], LABELS[0])[1]
        except RuntimeError:
            with pytest.raises(RuntimeError):
                model(IDS[0], LABELS[0])
        else:
            torch.testing.assert_close(model(IDS[0], LABELS[0])[1], expected)


def test_a_wrapper_around_torchs_function_runs_once(monkeypatch):
    model, calls = patched(Plain()), []
    expected = model(IDS[0], LABELS[0])[1]

    def twice(function):
        def wrapper(*args, **kwargs):
            calls.append(function.__name__)
            return 2 * function(*args, **kwargs)

        return wrapper

    for name in ("cross_entropy", "softmax"):
        monkeypatch.setattr(F, name, twice(getattr(F, name)))
    logits, loss = model(IDS[0], LABELS[0])
    assert torch.equal(loss, 2 * expected) and not logits.state.has_values
    torch.testing.assert_close(F.softmax(logits, -1), 2 * torch.softmax(logits, -1))
    assert calls == ["cross_entropy", "softmax"]


# Models of transformers


def bert(kind=transformers.BertForMaskedLM, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": N, "num_attention_heads": 4, "intermediate_size": 48}
    return kind(
        transformers.BertConfig(vocab_size=CLASSES, num_hidden_layers=1, **sizes | more)
    ).eval()


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": CLASSES, "d_model": N, "d_kv": 8, "d_ff": 48, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=4, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval()


SIZES = {
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
    "vocab_size": CLASSES,
    "d_model": N,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def bart():
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES)).eval()
    model.final_logits_bias += torch.linspace(-1, 1, CLASSES)
    return model


def whisper():
    torch.manual_seed(0)
    sizes = {"max_source_positions": 8, "num_mel_bins": 4, "suppress_tokens": None}
    config = transformers.WhisperConfig(**SIZES, **sizes, begin_suppress_tokens=None)
    return transformers.WhisperForConditionalGeneration(config).eval()


def encoder_decoder():
    of_both = bert().config, bert().config
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*of_both)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return transformers.EncoderDecoderModel(config).eval()


PRETRAINED = {
    "bert": (bert, "cls.predictions.decoder"),
    "tied": (lambda: bert(tie_word_embeddings=True), "cls.predictions.decoder"),
    "t5": (t5, "lm_head"),
    "bart": (bart, "lm_head"),
    "whisper": (whisper, "proj_out"),
    "encoder_decoder": (encoder_decoder, "decoder.cls.predictions.decoder"),
}
IGNORED = torch.where(LABELS < 0, -100, LABELS)


class AsPair(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, ids, targets):
        features = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3))
        features = features.to(next(self.parameters()).dtype)
        name = self.inner.main_input_name
        inputs = features if name == "input_features" else ids
        outputs = self.inner(**{name: inputs}, labels=torch.where(targets < 0, -100, targets))
        return outputs.logits, outputs.loss


@pytest.mark.usefixtures("any_size")
@grid(name=PRETRAINED, dtype=[torch.float32, torch.bfloat16])
def test_models_of_transformers(name, dtype):
    build, path = PRETRAINED[name]
    model = AsPair(build().to(dtype))
    exact, eager = several(copy.deepcopy(model).double()), several(model)
    report = patch(model, **OTHERS)
    assert {site.path for site in report.fused} == {f"inner.{path}"}
    assert report.fused[0].was.startswith("nn.CrossEntropyLoss, modeling_")
    assert not report.kept and not report.skipped
    ours = several(model, lazy=True)
    judge(ours, eager, exact)


def test_a_second_loss_in_the_same_forward():
    model = bert(transformers.BertForPreTraining)
    call = {"input_ids": IDS[0], "labels": IGNORED[0], "next_sentence_label": IDS[0, :, 0] % 2}
    expected = model(**call)
    patched(model)
    outputs = model(**call)
    assert not outputs.prediction_logits.state.has_values
    assert type(outputs.seq_relationship_logits) is torch.Tensor
    torch.testing.assert_close(outputs.loss, expected.loss)


def test_generate():
    model = t5()
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(IDS[0], **options)
    assert torch.equal(patched(model).generate(IDS[0], **options), expected)


# What is left, and what changes later


class Small(Plain):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(N, 8)

    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Accuracy(Plain):
    def forward(self, ids, targets):
        logits = self.head(self.norm(self.table(ids)))
        hits = (logits.argmax(-1) == targets).float().mean()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), hits


class Tempered(Plain):
    def forward(self, ids, targets):
        logits = F.log_softmax(self.head(self.norm(self.table(ids))), -1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Unlabelled(Plain):
    def forward(self, ids):
        logits = self.head(self.norm(self.table(ids)))
        targets = torch.zeros(ids.numel(), dtype=torch.int64)
        return F.cross_entropy(logits.flatten(0, 1), targets)


LEFT = {
    Small: "its logits are smaller than the head's input",
    Accuracy: "its forward also computes with the logits, in line ",
    Tempered: "its logits are not the output of a linear that its forward calls",
    Unlabelled: "its forward computes the labels itself",
}


@pytest.mark.parametrize("kind", LEFT)
def test_losses_that_stay_have_the_reason(kind):
    report = quietly(patch, kind(), **OTHERS)
    (site,) = report.kept
    assert site.kind == "loss" and site.reason.startswith(LEFT[kind]) and not report.fused


def test_hooks_on_the_head_see_logits():
    model, seen = patched(Plain()), []
    expected = results(unpatched(model), IDS[0], LABELS[0])
    model.head.register_forward_hook(lambda module, args, logits: seen.append(type(logits)))
    torch.testing.assert_close(results(model, IDS[0], LABELS[0], lazy=False), expected)
    assert seen == [torch.Tensor]


def test_a_lora_adapter_on_the_head():
    peft = pytest.importorskip("peft")
    model = patched(Plain())
    with_adapter = peft.get_peft_model(model, peft.LoraConfig(target_modules=["head"]))
    logits, loss = with_adapter(IDS[0], LABELS[0])
    assert type(logits) is torch.Tensor and loss.requires_grad
    report = quietly(patch, with_adapter, **OTHERS)
    (site,) = [s for s in (*report.skipped, *report.kept) if s.kind == "loss"]
    assert "linear" in site.reason


def test_a_head_trained_beside_adapters():
    peft = pytest.importorskip("peft")
    model = patched(Plain())
    config = peft.LoraConfig(target_modules=["table"], modules_to_save=["head"])
    logits, loss = peft.get_peft_model(model, config)(IDS[0], LABELS[0])
    expected = unpatched(model)(IDS[0], LABELS[0])
    torch.testing.assert_close((logits + 0, loss), expected)


class Checkpointed(Plain):
    def forward(self, ids, targets):
        x = checkpoint(lambda ids: self.norm(self.table(ids)), ids, use_reentrant=False)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def test_gradient_checkpointing():
    model = Checkpointed()
    expected = results(model, IDS[0], LABELS[0])
    torch.testing.assert_close(results(patched(model), IDS[0], LABELS[0], lazy=True), expected)

    def step(ids, targets):
        return model(ids, targets)[1]

    loss = checkpoint(step, IDS[0], LABELS[0], use_reentrant=False)
    assert torch.equal(loss, expected["loss"]) or loss.isclose(expected["loss"])
    loss.backward()
    torch.testing.assert_close(model.head.weight.grad, expected["head.weight"])


def test_compile():
    model = Plain()
    expected = results(model, IDS[0], LABELS[0])
    torch._dynamo.reset()
    compiled = torch.compile(patched(model), fullgraph=True, backend="aot_eager")
    logits, loss = compiled(IDS[0], LABELS[0])
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(loss, expected["loss"])
    torch._dynamo.reset()


def test_functional_transforms():
    model = Plain()
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (IDS[0], LABELS[0]))[1]

    expected = torch.func.grad(loss)(parameters)
    patched(model)
    torch.testing.assert_close(torch.func.grad(loss)(parameters), expected)


def test_without_gradients():
    model = Plain()
    with torch.no_grad():
        expected = model(IDS[0], LABELS[0])
        logits, loss = patched(model)(IDS[0], LABELS[0])
        assert type(logits) is LazyLogits and not loss.requires_grad
        torch.testing.assert_close((logits + 0, loss), expected)


def test_keep_logits():
    model = Plain()
    expected, _ = model(IDS[0], LABELS[0])
    patch(model, **OTHERS | {"loss": "keep_logits"})
    logits, loss = model(IDS[0], LABELS[0])
    loss.backward()
    nn.init.zeros_(model.head.weight)
    assert torch.equal(logits.detach(), expected.detach())


def test_unpatch_gives_back_what_was():
    model = Plain()
    state, expected = {**vars(model)}, results(model, IDS[0], LABELS[0])
    patched(model)
    assert vars(model) == state and pickle.loads(pickle.dumps(model)).__class__ is Plain
    assert type(Plain()(IDS[0], LABELS[0])[0]) is torch.Tensor  # another instance
    twin = copy.deepcopy(model)
    results(twin, IDS[0], LABELS[0], lazy=True)
    unpatch(model)
    actual = results(model, IDS[0], LABELS[0], lazy=False)
    assert all(torch.equal(actual[name], t) for name, t in expected.items())
    assert type(model) is Plain and type(model.head) is nn.Linear


def test_the_report_counts_the_call_and_follows_the_model():
    model = Plain()
    report = patch(model)
    assert report.coverage["loss"] == (1, 1)
    counts = report.counts((IDS[0], LABELS[0]))
    (loss,) = [site for site in counts.sites if site.kind == "loss"]
    assert (loss.kernel, loss.fallback, loss.backward_kernel) == (1, 0, 1)
    model.head.register_forward_hook(lambda *_: None)
    assert look_again(model, report)
    assert [s.reason for s in report.skipped if s.kind == "loss"] == ["the head has hooks"]
    unpatch(model)


def test_verify():
    patch(Plain(bias=True), verify=(IDS[0], LABELS[0]))
