"""Times patched models over eager ones: `python -m benchmarks models`.

Sixteen architectures in float32 and bfloat16: a training step with torch.optim.AdamW(fused=True)
and a forward without gradients, on whole sequences and, where the model takes a mask, on padded
ones. Dropout is the models' own.
"""

import gc
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import fusedops
from benchmarks.harness import report
from benchmarks.harness.timing import interleaved
from benchmarks.workloads import plain
from benchmarks.workloads.step import EAGER, OURS, VOCABULARY, words
from fusedops.measuring.ratios import Ratio, paired_ratio

BATCH, LENGTH, HIDDEN, LAYERS, HEADS = 4, 256, 384, 2, 6
QUICK = ("GPT-like",)
# The median over the models that is asked for.
MEDIANS = {
    ("training", torch.float32): 1.15,
    ("training", torch.bfloat16): 1.5,
    ("inference", torch.float32): 1.1,
    ("inference", torch.bfloat16): 1.3,
}

Inputs = dict[str, Tensor]


class Subject(ABC):
    """A model, and its call. pads: whether it takes a mask of padding."""

    pads = True

    @abstractmethod
    def make(self) -> nn.Module: ...

    @abstractmethod
    def inputs(self, padded: bool, dtype: torch.dtype, trains: bool) -> Inputs: ...

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return model(**inputs).loss


class Text(Subject):
    """A model of transformers on words. names: its class, and what of it differs from SIZES."""

    def __init__(self, name: str, **options: object):
        self.name, self.options = name, options

    def make(self) -> nn.Module:
        kind = getattr(transformers, self.name)
        return kind(kind.config_class(**{**SIZES, **self.options}))

    def inputs(self, padded: bool, dtype: torch.dtype, trains: bool) -> Inputs:
        ids = words(BATCH, LENGTH)
        inputs = {"input_ids": ids}
        if padded:
            inputs["attention_mask"] = mask()
        if trains:
            labels = ids if not padded else ids.masked_fill(mask() == 0, -100)
            return inputs | {"labels": labels}
        if "is_encoder_decoder" in self.options:
            inputs["decoder_input_ids"] = ids
        return inputs


def mask() -> Tensor:
    """int64 [BATCH, LENGTH]: the sequences are from half to whole."""
    lengths = torch.linspace(LENGTH // 2, LENGTH, BATCH).long()
    return (torch.arange(LENGTH) < lengths[:, None]).long()


SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
}
GATED = {"intermediate_size": 1024, "num_key_value_heads": HEADS // 2}
SEQ2SEQ = {"is_encoder_decoder": True, "decoder_start_token_id": 0, "d_model": HIDDEN}
BART = {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 4 * HIDDEN}.items()
}
T5 = {"num_layers": LAYERS, "num_heads": HEADS, "d_ff": 1024, "feed_forward_proj": "gated-gelu"}


class Speech(Subject):
    pads = False

    def make(self) -> nn.Module:
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        sizes = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "max_source_positions": LENGTH}
        config = transformers.WhisperConfig(**sizes, **ids, **BART)
        return transformers.WhisperForConditionalGeneration(config)

    def inputs(self, padded: bool, dtype: torch.dtype, trains: bool) -> Inputs:
        inputs = {"input_features": torch.randn(BATCH, 80, 2 * LENGTH).to(dtype)}
        return inputs | {"labels" if trains else "decoder_input_ids": words(BATCH, LENGTH // 4)}


class Images(Subject):
    """transformers' ViT."""

    pads = False

    def make(self) -> nn.Module:
        config = transformers.ViTConfig(**SIZES, intermediate_size=4 * HIDDEN, num_labels=10)
        return transformers.ViTForImageClassification(config)

    def inputs(self, padded: bool, dtype: torch.dtype, trains: bool) -> Inputs:
        labels = {"labels": torch.arange(BATCH)} if trains else {}
        return {"pixel_values": torch.randn(BATCH, 3, 224, 224).to(dtype)} | labels


class PlainImages(Subject):
    pads = False

    def make(self) -> nn.Module:
        return plain.ImageEncoder(10, HIDDEN, LAYERS, HEADS)

    def inputs(self, padded: bool, dtype: torch.dtype, trains: bool) -> Inputs:
        return {"images": torch.randn(BATCH, 3, 224, 224).to(dtype)}

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return F.cross_entropy(model(**inputs), torch.arange(BATCH))


class PlainText(Subject):
    pads = False

    def __init__(self, kind: Callable[..., nn.Module]):
        self.kind = kind

    def make(self) -> nn.Module:
        return self.kind(VOCABULARY, HIDDEN, LAYERS, HEADS, LENGTH)

    def inputs(self, padded: bool, dtype: torch.dtype, trains: bool) -> Inputs:
        ids = words(BATCH, LENGTH)
        return {"ids": ids} | ({"targets": ids} if trains and self.kind is plain.GPT else {})

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        if self.kind is plain.GPT:
            return model(**inputs)[1]
        logits = model(**inputs)
        return F.cross_entropy(logits.flatten(0, 1), inputs["ids"].flatten())


class TorchEncoder(Subject):
    """torch.nn.TransformerEncoder."""

    def make(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, batch_first=True)
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def inputs(self, padded: bool, dtype: torch.dtype, trains: bool) -> Inputs:
        inputs = {"src": torch.randn(BATCH, LENGTH, HIDDEN).to(dtype)}
        return inputs | ({"src_key_padding_mask": mask() == 0} if padded else {})

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return model(**inputs).float().pow(2).mean()


SUBJECTS: dict[str, Subject] = {
    "Llama": Text("LlamaForCausalLM", **GATED),
    "Qwen3": Text("Qwen3ForCausalLM", head_dim=64, **GATED),
    "Gemma 2": Text("Gemma2ForCausalLM", head_dim=64, **GATED),
    "GPT-2": Text("GPT2LMHeadModel", bos_token_id=1, eos_token_id=2),
    "BERT": Text("BertForMaskedLM", intermediate_size=4 * HIDDEN),
    "DistilBERT": Text("DistilBertForMaskedLM", hidden_dim=4 * HIDDEN),
    "ModernBERT": Text("ModernBertForMaskedLM", intermediate_size=576, pad_token_id=0),
    "T5": Text("T5ForConditionalGeneration", **T5, **SEQ2SEQ),
    "BART": Text("BartForConditionalGeneration", **BART, **SEQ2SEQ),
    "ViT": Images(),
    "Whisper": Speech(),
    "Qwen3-MoE": Text(
        "Qwen3MoeForCausalLM",
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=384,
        **GATED,
    ),
    "GPT-like": PlainText(plain.GPT),
    "rotary-like": PlainText(plain.RotaryLM),
    "image-like": PlainImages(),
    "TransformerEncoder": TorchEncoder(),
}


def measure(args: Namespace) -> int:
    """Times every model and writes `args.json`. Returns the exit status."""
    rows, goals = [], []
    for (mode, dtype), asked in MEDIANS.items():
        kind, medians = str(dtype).removeprefix("torch."), []
        for name in QUICK if args.quick else SUBJECTS:
            for padded in (False, True)[: 1 + SUBJECTS[name].pads]:
                title = f"{mode} of {name} {kind}{', padded' if padded else ''}"
                ratio = _ratio(SUBJECTS[name], mode == "training", dtype, padded, args.seconds)
                print(f"{title}: {ratio} over eager", flush=True)
                row = {"model": name, "mode": mode, "dtype": kind, "padded": padded}
                rows.append(row | {"over_eager": ratio})
                goals.append(report.goal(title, "upper end over eager", 1.0, ratio.high))
                medians.append(ratio.median)
        middle = float(torch.tensor(medians).quantile(0.5))
        goals.append(report.goal(f"median of {mode} in {kind}", "over eager", asked, middle))
    report.save(args, rows, goals)
    return 0


def _ratio(
    subject: Subject, trains: bool, dtype: torch.dtype, padded: bool, seconds: float
) -> Ratio:
    calls = dict(_calls(subject, trains, dtype, padded))
    times = interleaved({name: (call, nullcontext) for name, call in calls.items()}, seconds)
    del calls
    gc.collect()
    return paired_ratio(times[EAGER], times[OURS])


def _calls(
    subject: Subject, trains: bool, dtype: torch.dtype, padded: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    torch.manual_seed(0)
    inputs = subject.inputs(padded, dtype, trains)
    for name in (EAGER, OURS):
        torch.manual_seed(0)
        model = subject.make().to(dtype).train(trains)
        if name == OURS:
            fusedops.patch(model)
        yield name, _step(subject, model, inputs) if trains else _forward(model, inputs)


def _step(subject: Subject, model: nn.Module, inputs: Inputs) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        subject.loss(model, inputs).backward()
        optimizer.step()

    return run


def _forward(model: nn.Module, inputs: Inputs) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return model(**inputs)

    return run
