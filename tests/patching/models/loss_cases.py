"""Small causal models for loss tests, and helpers that run and compare them."""

import contextlib
import copy

import torch
import torch.nn.functional as F
import transformers

from fusedops.patching import patch
from fusedops.patching.core.kinds import only
from fusedops.patching.models.loss.logits import LazyLogits
from fusedops.testing import within
from patching.architectures import PLAIN
from patching.quiet import quietly

SIZES = PLAIN
IDS = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(torch.arange(8) < 3, -100, IDS)
BATCHES = torch.randint(3, 64, (8, 2, 8), generator=torch.Generator().manual_seed(1))
OTHERS = only("loss")


def llama(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | more))


def biased(**more):
    """Returns a head with a bias."""
    model = llama(**more)
    model.lm_head = torch.nn.Linear(32, 64)
    return model


def gemma2(**more):
    """A model with a softcap of 2; at the usual 30 it would hardly matter."""
    torch.manual_seed(0)
    head_sizes = {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    config = transformers.Gemma2Config(**SIZES | head_sizes | more, final_logit_softcapping=2.0)
    return transformers.Gemma2ForCausalLM(config)


def cohere(**more):
    """A model that scales its logits by 1 / 16."""
    torch.manual_seed(0)
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES | more))


def patched(model):
    """Returns the model with its loss patched alone, so that whatever differs is the loss's."""
    patch(model, **OTHERS)
    return model


def loss_site(model, **options):
    report = quietly(patch, model, **OTHERS | options)
    (site,) = (site for site in [*report.fused, *report.skipped] if site.kind == "loss")
    return site


def trainer(model, folder, data, callbacks=(), compute_metrics=None, **arguments):
    """Returns a quiet Trainer, which evaluates on what it trains on."""
    options = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    options |= {"output_dir": str(folder)} | arguments
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(**options),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=compute_metrics,
        callbacks=[*callbacks],
    )


def made(outputs):
    """Whether logits were made: not lazy ones, or lazy ones that were read."""
    logits = outputs.logits
    assert isinstance(logits, torch.Tensor)
    return bool(logits.state.cell) if type(logits) is LazyLogits else True


def gradients(model, loss):
    """Returns the gradients of every parameter that the loss reaches."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, grads, strict=True) if g is not None}


def results(model, ids=IDS, labels=LABELS, **more):
    """Returns outputs, and the loss and its gradients by name."""
    outputs = model(input_ids=ids, labels=labels, **more)
    return outputs, {"loss": outputs.loss.detach()} | gradients(model, outputs.loss)


def several(model, **call):
    """Returns the results of some batches, as one tensor each."""
    batches = [results(model, ids, **call)[1] for ids in BATCHES]
    return {name: torch.stack([result[name] for result in batches]) for name in batches[0]}


def causal_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_
):
    """transformers' ForCausalLMLoss, in the logits' dtype."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    rows, targets = logits.view(-1, vocab_size), shift_labels.reshape(-1)
    loss = F.cross_entropy(rows, targets, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


@contextlib.contextmanager
def in_float64(model):
    """Returns a float64 copy of an unpatched model with a float64 loss."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.loss_function = causal_loss
    yield exact


def judge(ours, eager, exact):
    """Every result by the yardstick, over the whole of it: below the head both sides' rounding
    differs, and of few elements either may be right by luck. An ulp of the result and of the
    model's typical gradient is nothing, as for `patch(verify=...)`.
    """
    assert ours.keys() == eager.keys() == exact.keys()
    squares = [g.square().mean() for name, g in exact.items() if name != "loss"]
    typical = torch.stack(squares).mean().sqrt()
    for name, result in ours.items():
        assert result.dtype == eager[name].dtype, name
        complaint = within(result, eager[name], exact[name], rows=False)
        size = exact[name].abs().max() + (0 if name == "loss" else typical)
        off = (result - exact[name]).abs().max()
        nothing = off <= torch.finfo(result.dtype).eps * size
        assert complaint is None or nothing, f"{name}: {complaint}"
