"""Builds input batches for a transformers model from its forward's argument names."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from checks.families.media import media
from checks.families.shrink import VOCABULARY

__all__ = ["batches"]

BATCH, TOKENS, PADDED = 2, 12, 3
FIRST_WORD = 40  # smaller ids have special meanings
Batch = dict[str, Any]


def batches(model: nn.Module, labelled: bool) -> Iterator[Batch]:
    """Yields batches that the model may accept, the fullest first. The caller tries them.

    labelled: include labels if the forward takes them.
    """
    names = set(inspect.signature(model.forward).parameters)
    for seen in media(model, names, BATCH):
        for text in _texts(model, names, seen):
            for labels in _labels(model, names, text) if labelled else ({},):
                yield {**seen.batch, **text, **labels, **_switches(names)}


def _switches(names: set[str]) -> Batch:
    return {"use_cache": False} if "use_cache" in names else {}


def _texts(model: Any, names: set[str], seen: Any) -> Iterator[Batch]:
    """Token ids. Placeholders for images and sounds come first."""
    words = _words(model, TOKENS)
    if "input_ids" in names:
        ids = torch.cat([seen.tokens, words], 1)
        text: Batch = {"input_ids": ids}
        if "attention_mask" in names:
            text["attention_mask"] = torch.ones_like(ids)
            text["attention_mask"][1, -PADDED:] = 0
        if "mm_token_type_ids" in names:
            text["mm_token_type_ids"] = torch.zeros_like(ids)
            text["mm_token_type_ids"][:, : seen.tokens.shape[1]] = seen.type
        if "bbox" in names:
            text["bbox"] = torch.tensor([1, 2, 9, 7]).expand(*ids.shape, 4)
        if "lang_ids" in names:
            text["lang_ids"] = torch.zeros(BATCH, dtype=torch.long)
        if "decoder_input_ids" in names:
            yield {**text, "decoder_input_ids": words[:, 2:]}
        yield text
        yield {name: text[name] for name in ("input_ids", "bbox") if name in text}
    elif "decoder_input_ids" in names:
        yield {"decoder_input_ids": words[:, 2:]}
    else:
        yield {}


def _labels(model: Any, names: set[str], text: Batch) -> Iterator[Batch]:
    """Yields labels per token, per sentence without alignment, per row, and none."""
    if "labels" in names:
        tokens = text.get("decoder_input_ids", text.get("input_ids"))
        if tokens is not None:
            labels = tokens.clone()
            labels[1, -PADDED:] = -100
            yield {"labels": labels}
        if "CTC" in type(model).__name__:
            yield {"labels": _words(model, 2)}
        yield {"labels": torch.tensor([0, 1])}
    yield {}


def _words(model: Any, length: int) -> Tensor:
    table = _embedding(model)
    size = min(VOCABULARY, table.num_embeddings if isinstance(table, nn.Embedding) else VOCABULARY)
    first = FIRST_WORD if size > FIRST_WORD + 1 else 0
    draws = torch.Generator().manual_seed(2)
    return torch.randint(first, size, (BATCH, length), generator=draws)


def _embedding(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
