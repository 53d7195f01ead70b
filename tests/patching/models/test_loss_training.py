"""patch's fused loss works with PEFT, accelerate, Trainer, DDP, FSDP2 and ZeRO-3."""

import threading

import pytest
import torch
from axes import grid
from children import on_ranks

from fusedops.patching import unpatch
from patching.models.loss_cases import (
    IDS,
    LABELS,
    gemma2,
    gradients,
    llama,
    loss_site,
    made,
    patched,
    results,
    trainer,
)

pytestmark = pytest.mark.usefixtures("any_size")

peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "biased": {"target_modules": ["lm_head"], "lora_bias": True},
    "rank-stabilised": {"target_modules": ["lm_head"], "use_rslora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "elsewhere": {"target_modules": ["q_proj"]},
}
LAZY = "saved", "elsewhere"
DEEPSPEED = "deepspeed.runtime.zero.parameter_offload"


def adapted(model, adapter, **more):
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **adapter | more))
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            p.data.add_(0.2 * torch.randn_like(p))
    return model.eval()


def models(adapter, order, build=llama):
    """Returns a patched and an unpatched model. patch ran before or after PEFT."""
    if order == "before":
        return adapted(patched(build()), adapter), adapted(build(), adapter)
    return patched(adapted(build(), adapter)), adapted(build(), adapter)


def same(ours, theirs):
    """Compares loss, gradients and logits; returns whether logits were computed."""
    outputs, actual = results(ours)
    their_outputs, expected = results(theirs)
    were_made = made(outputs)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(outputs.logits.detach(), their_outputs.logits.detach())
    return were_made


@grid(order=["before", "after"], name=ADAPTERS)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:.*tied")
def test_adapters(name, order):
    ours, theirs = models(ADAPTERS[name], order, gemma2)
    assert same(ours, theirs) == (name not in LAZY)
    call = {"input_ids": IDS, "labels": LABELS}
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours(**call).loss, theirs(**call).loss)


@pytest.mark.parametrize("order", ["before", "after"])
def test_merged_adapters(order):
    ours, theirs = models(ADAPTERS["lora"], order)
    for model in (ours, theirs):
        model.merge_adapter()
    call = {"input_ids": IDS, "labels": LABELS}
    torch.testing.assert_close(ours(**call).loss, theirs(**call).loss)
    for model in (ours, theirs):
        model.unmerge_adapter()
    same(ours, theirs)
    alone, unpatched = ours.merge_and_unload(), theirs.merge_and_unload()
    torch.testing.assert_close(alone(**call).loss, unpatched(**call).loss)


@pytest.mark.parametrize("name", ["lora", "saved"])
def test_more_than_one_adapter(name):
    both = models(ADAPTERS[name], "before")
    for model in both:
        torch.manual_seed(3)
        model.add_adapter("other", peft.LoraConfig(r=2, **ADAPTERS[name]))
        for part, p in model.named_parameters():
            if "other" in part:
                p.data.add_(0.2 * torch.randn_like(p))
    for adapter in ("other", "default"):
        for model in both:
            model.set_adapter(adapter)
        same(*both)


def test_lora_dropout_on_the_head():
    both_results = []
    for model in (patched(llama()), llama()):
        model = adapted(model, ADAPTERS["lora"], lora_dropout=0.5).train()
        torch.manual_seed(7)
        both_results.append(results(model)[1])
    torch.testing.assert_close(*both_results)


@pytest.fixture
def no_accelerator():
    """accelerate keeps the first precision that a process asked for, Trainer's too."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_in_bfloat16(order, no_accelerator):
    """Its autocast casts the outputs to float32: that reads nothing."""
    model = llama()
    whole = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    if order == "before":
        model = whole.prepare(patched(model))
    else:
        site = loss_site(model := whole.prepare(model))
        assert site.reason == "computed from logits: the model has its own forward"
    outputs = model(input_ids=IDS, labels=LABELS)
    assert made(outputs) == (order == "after") and outputs.logits.dtype == torch.float32
    theirs = whole.prepare(llama())
    plain = theirs(input_ids=IDS, labels=LABELS)
    torch.testing.assert_close(outputs.loss, plain.loss, rtol=2**-8, atol=0)
    actual, expected = gradients(model, outputs.loss), gradients(theirs, plain.loss)
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=5e-3)
    assert torch.equal(outputs.logits.detach(), plain.logits.detach())
    unpatch(model)
    assert type(model(input_ids=IDS, labels=LABELS).logits) is torch.Tensor


@pytest.mark.parametrize("order", ["before", "after"])
def test_weights_that_are_offloaded(order):
    model = llama().eval()
    expected = model(IDS, labels=LABELS)
    if order == "before":
        patched(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    if order == "after":
        patched(model)
    with torch.no_grad():
        outputs = model(IDS, labels=LABELS)
    torch.testing.assert_close(outputs.loss, expected.loss.detach())
    assert made(outputs) and torch.equal(outputs.logits, expected.logits.detach())


class Texts(torch.utils.data.Dataset):
    """Of other numbers of ignored labels, which gradient accumulation has to weigh."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        ids = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": torch.where(torch.arange(8) < i % 5, -100, ids)}


def trained(model, folder, compute_metrics=None, **more):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 3}
    settings |= {"learning_rate": 1e-2, "logging_steps": 1} | more
    hf_trainer = trainer(model, folder, Texts(), compute_metrics=compute_metrics, **settings)
    hf_trainer.train()
    history = hf_trainer.state.log_history
    losses = [entry[key] for entry in history for key in ("loss", "grad_norm") if key in entry]
    evaluated, predicted = hf_trainer.evaluate(), hf_trainer.predict(Texts())
    scores = [evaluated["eval_loss"], evaluated.get("eval_accuracy", 0.0)]
    return torch.tensor(losses + scores), predicted.predictions


def accuracy(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


TRAINERS = {
    "loss alone": {"prediction_loss_only": True},
    "metrics": {"compute_metrics": accuracy},
    "smoothed": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.filterwarnings("ignore")
def test_trainer(name, tmp_path):
    (expected, theirs), (actual, ours) = (
        trained(model, tmp_path, **TRAINERS[name]) for model in (llama(), patched(llama()))
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert type(ours) is type(theirs)
    if ours is not None:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-3)


class Sharded:
    """As ZeRO-3 shards a head: the weight is there in the head's call, and from a function on its
    output on, in backward.
    """

    def __init__(self, head):
        self.head, self.whole, self.calls = head, head.weight.data, 0
        # DeepSpeed's hooks are known by their module
        for hook in (self.gather, self.free):
            hook.__func__.__module__ = DEEPSPEED
        head.register_forward_pre_hook(self.gather)
        head.register_forward_hook(self.free)
        head.weight.data = torch.empty(0)

    def gather(self, *_):
        self.calls += 1
        self.head.weight.data = self.whole

    def free(self, module, args, output):
        self.head.weight.data = torch.empty(0)
        sharded = self

        class Gather(torch.autograd.Function):
            __module__ = DEEPSPEED

            @staticmethod
            def forward(ctx, output):
                return output.detach()

            @staticmethod
            def backward(ctx, grad):
                sharded.head.weight.data = sharded.whole
                return grad

        return Gather.apply(output)


def test_a_weight_that_is_there_in_the_heads_call_alone():
    plain, expected = results(llama())
    model = patched(llama())
    sharded = Sharded(model.lm_head)
    outputs = model(IDS, labels=LABELS)
    assert not made(outputs) and sharded.calls == 2
    assert torch.equal(outputs.logits.detach(), plain.logits.detach()) and sharded.calls == 3
    torch.testing.assert_close({"loss": outputs.loss} | gradients(model, outputs.loss), expected)


RANKS = ["ddp", "collectives", "everything", "fsdp", "fsdp_tied", "fsdp_then_patch"]
RANKS += ["fsdp_in_bfloat16", "fsdp_eval", "stepped", "stepped_and_kept"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What both ranks print. One start runs all cases, because imports take most of the time."""
    done = on_ranks("sharded_loss", 2, RANKS, tmp_path_factory.mktemp("ranks"))
    return [rank.stdout + rank.stderr for rank in done]


@pytest.mark.parametrize("case", RANKS)
def test_two_ranks(case, two_ranks):
    for printed in two_ranks:
        assert case in printed.splitlines(), printed[-4000:]


def test_replicas_in_threads():
    """As DataParallel makes them: other objects of the same class, each with its own head."""
    model, losses = patched(llama()), []
    twins = [model._replicate_for_data_parallel() for _ in range(3)]
    for twin in twins:
        twin.model, twin.lm_head = model.model, model.lm_head._replicate_for_data_parallel()
        twin.lm_head._parameters = {"weight": model.lm_head.weight, "bias": None}

    def run(twin):
        outputs = twin(IDS, labels=LABELS)
        losses.append(None if made(outputs) else outputs.loss.detach())

    threads = [threading.Thread(target=run, args=[twin]) for twin in twins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(losses, [llama()(IDS, labels=LABELS).loss.detach()] * 3)
