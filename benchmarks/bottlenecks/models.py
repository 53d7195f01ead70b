"""Builds small Llama, BERT, GPT-2 and T5 models with training steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["CONFIGS", "VOCABULARY", "Kind", "workload"]

VOCABULARY = 4000
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
T5 = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": partial(
        transformers.LlamaConfig, intermediate_size=688, num_key_value_heads=4, **SIZES
    ),
    "bert": partial(transformers.BertConfig, intermediate_size=1024, **SIZES),
    "gpt2": partial(transformers.GPT2Config, n_embd=256, n_layer=4, n_head=8),
    "t5": partial(transformers.T5Config, decoder_start_token_id=0, **T5),
}
HEADS = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}


@dataclass(frozen=True)
class Kind:
    """The size of a training step."""

    batch: int
    length: int


def workload(name: str) -> tuple[nn.Module, Any, Callable[[Any], None]]:
    """A model, its optimizer and its step on tokens, or on a dictionary of its arguments."""
    torch.manual_seed(0)
    config = CONFIGS[name](vocab_size=VOCABULARY)
    config._attn_implementation = "sdpa"
    home = HEADS.get(name, transformers.AutoModelForCausalLM)
    model = home.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        arguments = batch if isinstance(batch, Mapping) else {"input_ids": batch, "labels": batch}
        model(**arguments).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
