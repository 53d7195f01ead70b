"""On tiny models of many architectures, patch keeps results and finds all that it could fuse.

What is there to fuse is found without the patcher: by class names, and by watching the unpatched
model run (which norms are called, and which of them get a sum that their caller made).
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from axes import grid
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedops.patching import patch, unpatch
from fusedops.patching.lines.rotary import site as rotary
from fusedops.patching.yardstick import Yardstick, run
from patching.architectures import DECODERS, ENCODER_DECODERS, ENCODERS, SPEECH, VISION_TOWERS
from patching.quiet import quietly

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

GROUPS = [
    (DECODERS, "AutoModelForCausalLM"),
    (ENCODERS, "AutoModel"),
    (VISION_TOWERS, "AutoModel"),
    (ENCODER_DECODERS, "AutoModelForSeq2SeqLM"),
    (SPEECH, "AutoModel"),
]
NAMES = [name for group, _ in GROUPS for name in group]
# (fused, found) of norms, and of sums that are normed where they are made
COVERAGE = dict.fromkeys(NAMES, ((5, 5), (2, 2))) | {
    "qwen3": ((9, 9), (2, 2)),
    "gemma2": ((9, 9), (2, 2)),
    "gemma3_text": ((13, 13), (2, 2)),
    "phi": ((3, 3), (0, 0)),
    "gpt2": ((5, 5), (4, 4)),
    "gptj": ((3, 3), (0, 0)),
    "opt": ((5, 5), (2, 4)),
    "bloom": ((6, 6), (0, 0)),
    "falcon": ((3, 3), (0, 0)),
    "olmo2": ((9, 9), (0, 0)),
    "cohere": ((3, 3), (0, 0)),
    "nemotron": ((0, 5), (0, 2)),
    "glm4": ((9, 9), (2, 2)),
    "mamba": ((3, 3), (0, 0)),
    "mamba2": ((3, 5), (0, 0)),
    "xglm": ((5, 5), (4, 4)),
    "bert": ((5, 5), (5, 5)),
    "roberta": ((5, 5), (5, 5)),
    "distilbert": ((5, 5), (5, 5)),
    "electra": ((5, 5), (5, 5)),
    "albert": ((3, 3), (3, 3)),
    "deberta-v2": ((5, 5), (4, 6)),
    "mpnet": ((5, 5), (5, 5)),
    "clip_vision_model": ((6, 6), (2, 2)),
    "siglip_vision_model": ((6, 6), (2, 2)),
    "convnext": ((5, 9), (0, 0)),
    "t5": ((12, 12), (0, 0)),
    "bart": ((12, 12), (12, 12)),
    "mbart": ((14, 14), (10, 10)),
    "pegasus": ((12, 12), (8, 8)),
    "marian": ((10, 10), (10, 10)),
    "whisper": ((12, 12), (8, 8)),
    "wav2vec2": ((6, 7), (5, 5)),
}


# gated products that are fused
GATED = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "cohere", "granite", "stablelm"),
    (2, "swiglu"),
)
GATED |= dict.fromkeys(("phi3", "glm4", "qwen2_moe"), (2, "swiglu"))
GATED |= dict.fromkeys(("gemma", "gemma2", "gemma3_text"), (2, "geglu(approximate='tanh')"))
GATED |= {"modernbert": (2, "geglu")}
# rotary embeddings that are fused, and those that are left
ROTATED = dict.fromkeys(
    (
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
        *("gpt_neox", "falcon", "olmo", "olmo2", "granite", "stablelm", "starcoder2", "nemotron"),
        *("mixtral", "qwen2_moe", "gpt_oss", "modernbert"),
    ),
    (2, "rotary_embedding"),
)
ROTATED |= dict.fromkeys(("cohere", "glm4"), (2, "rotary_embedding(interleaved=True)"))
ROTATED |= {"gptj": (8, "rotary_embedding(interleaved=True)")}
# activations that go into the linear before them
ACTIVATED = dict.fromkeys(
    ("phi", "gpt2", "gptj", "bloom", "starcoder2"), (2, "linear(activation='gelu_tanh')")
)
ACTIVATED |= dict.fromkeys(
    (
        *("falcon", "gpt_neox", "xglm", "bert", "roberta", "electra", "deberta-v2", "mpnet"),
        *("vit", "dinov2", "distilbert"),
    ),
    (2, "linear(activation='gelu')"),
)
ACTIVATED |= dict.fromkeys(
    ("convnext", "bart", "mbart", "pegasus", "marian", "whisper"), (4, "linear(activation='gelu')")
)
ACTIVATED |= {
    "albert": (1, "linear(activation='gelu_tanh')"),
    "wav2vec2": (2, "linear(activation='gelu')"),
    "siglip_vision_model": (3, "linear(activation='gelu_tanh')"),
    "opt": (2, "linear(activation='relu')"),
    "t5": (4, "linear(activation='relu')"),
}


def build(name):
    """The model with random weights (norm weights and biases too), in eval mode, and a batch."""
    group, auto = next((g, auto) for g, auto in GROUPS if name in g)
    config = transformers.AutoConfig.for_model(name, **group[name])
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config).eval()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    ids = torch.randint(3, 64, (2, 8))
    if group is VISION_TOWERS:
        size = config.image_size
        return model, {"pixel_values": torch.randn(2, 3, size, size)}
    if name == "whisper":
        return model, {"input_features": torch.randn(2, 4, 16), "decoder_input_ids": ids}
    if name == "wav2vec2":
        return model, {"input_values": torch.randn(2, 200)}
    return model, {"input_ids": ids} | ({} if group is ENCODERS else {"labels": ids})


def in_dtype(batch, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


@grid(dtype=[torch.float32, torch.bfloat16], name=NAMES)
def test_same_outputs_and_gradients(name, dtype):
    model, batch = build(name)
    model, batch = model.to(dtype), in_dtype(batch, dtype)
    before = Yardstick(model, batch)
    quietly(patch, model)
    after = run(model, batch)
    assert after.keys() == before.eager.keys()
    assert [name for name, result in after.items() if not before.within(name, result)] == []
    after = run(model, batch, gradients=False)
    assert [name for name, result in after.items() if not before.within(name, result)] == []
    unpatch(model)
    for result, again in run(model, batch).items():
        assert torch.equal(again, before.eager[result])


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", NAMES)
def test_every_norm_and_every_normed_sum_is_fused_or_explained(name, norms):
    model, batch = build(name)
    seen = watch(model, batch)
    report = quietly(patch, model)
    coverage = (report.coverage.get(kind, (0, 0)) for kind in ("norm", "residual"))
    assert (*coverage,) == COVERAGE[name]
    named = {p for p, m in model.named_modules() if is_norm(m)}
    normed, sums = sites(report, "norm"), sites(report, "residual")
    assert named <= normed.keys()
    assert set(seen.norms) <= normed.keys()
    assert {pair.norm for pair in seen.sums} <= sums.keys()
    assert all(site.now or site.reason for site in [*report.fused, *report.skipped])

    norms.clear()
    with torch.no_grad():
        model(**batch)
    added = [p for p in seen.sums if sums[p.norm].now and p.plain]
    assert sum(name.startswith("add") for name in norms) == len(added)
    assert len(norms) == sum(bool(normed[path].now) for path in seen.norms)


@pytest.mark.parametrize("name", NAMES)
def test_every_linear_gated_product_and_loss_is_fused(name, any_size):
    model, _ = build(name)
    named = {p for p, m in model.named_modules() if type(m).__name__.endswith(("Linear", "Conv1D"))}
    report = quietly(patch, model)
    fused = [site for site in report.fused if site.kind in ("linear", "mlp")]
    assert {site.path for site in fused if site.kind == "linear"} == named
    assert not [site for site in report.skipped if site.kind in ("linear", "mlp")]
    losses = [site.now for site in report.fused if site.kind == "loss"]
    assert losses == ["linear_cross_entropy"] * (name in DECODERS | ENCODER_DECODERS)
    now = Counter(site.now for site in fused)
    del now["linear"]
    expected = [table[name] for table in (GATED, ACTIVATED) if name in table]
    assert now == Counter({what: n for n, what in expected})


@pytest.mark.parametrize("name", NAMES)
def test_every_rotary_embedding_is_fused_or_explained(name, recorded):
    model, batch = build(name)
    report = quietly(patch, model)
    rotary_sites = [site for site in [*report.fused, *report.skipped] if site.kind == "rotary"]
    seen = Counter(site.now or site.reason for site in rotary_sites)
    assert seen == Counter({what: n for n, what in [ROTATED.get(name, (0, ""))]})
    calls = recorded(rotary, "rotary_embedding")
    with torch.no_grad():
        model(**batch)
    fused = sum(bool(site.now) for site in rotary_sites)
    assert len(calls) == (fused / 2 if name == "gptj" else fused)  # it takes one of two branches


def is_norm(module):
    """By name alone, leaves only; a GroupNorm is no site."""
    name = type(module).__name__
    return "norm" in name.lower() and name != "GroupNorm" and not list(module.children())


def sites(report, kind):
    """path -> site; where a sum was left in one branch and fused in another, the fused one."""
    ordered = [*report.skipped, *report.fused]
    return {site.path: site for site in ordered if site.kind == kind}


@dataclass
class Sum:
    """A sum that a module made and then normed. plain: of two contiguous tensors alike."""

    norm: str
    plain: bool


@dataclass
class Seen:
    norms: list[str] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)


class Additions(TorchFunctionMode):
    """Remembers every sum, and which module was running."""

    def __init__(self, running):
        super().__init__()
        self.running, self.made = running, {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add):
            a, b = args[:2]
            both = isinstance(a, Tensor) and isinstance(b, Tensor)
            plain = both and a.shape == b.shape and a.dtype == b.dtype
            plain = plain and a.is_contiguous() and b.is_contiguous()  # else the sum is not
            self.made[id(result)] = result, self.running[-1], plain
        return result


def watch(model, batch):
    """Runs the unpatched model: the norms that are called, and those that get a sum."""
    seen, running, hooks = Seen(), [], []
    additions = Additions(running)

    def before(path, module, args):
        caller = running[-1] if running else None
        running.append(path)
        if is_norm(module):
            seen.norms.append(path)
            _, maker, plain = additions.made.get(id(args[0]), (None, None, False))
            if maker is not None and maker == caller:
                seen.sums.append(Sum(path, plain))

    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda m, a, p=path: before(p, m, a)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    with torch.no_grad(), additions:
        model(**batch)
    for hook in hooks:
        hook.remove()
    return seen
