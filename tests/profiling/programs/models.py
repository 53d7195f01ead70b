"""A small decoder and random texts, for the programs beside this file."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, LENGTH = 500, 96, 65


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 384), nn.GELU(), nn.Linear(384, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.before_attention(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))


def texts(count):
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(WORDS, (count, LENGTH), generator=generator))


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(count):
    """Rows of a dataset for a language model."""
    return [{"input_ids": ids, "labels": ids} for ids in texts(count)]
