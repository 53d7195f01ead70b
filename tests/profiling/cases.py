"""Small models and steps that tests profile, and comparisons of their state."""

import copy
import random

import numpy
import torch
import transformers
from torch import nn

BATCH, LENGTH, VOCABULARY = 4, 128, 4000

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    ),
    "bert": lambda: transformers.BertConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=256, n_layer=4, n_head=8, n_positions=512, vocab_size=VOCABULARY
    ),
    "t5": lambda: transformers.T5Config(
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=4,
        num_heads=8,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
    ),
}
HEADS = {
    "llama": transformers.AutoModelForCausalLM,
    "bert": transformers.AutoModelForMaskedLM,
    "gpt2": transformers.AutoModelForCausalLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "qwen3_moe": transformers.AutoModelForCausalLM,
}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": lambda params: torch.optim.SGD(params, lr=0.1)}


def model_of(name, dtype=torch.float32, train=True, attention="sdpa"):
    config = CONFIGS[name]()
    config._attn_implementation = attention
    return HEADS[name].from_config(config, dtype=dtype).train(train)


def tokens(batch=BATCH, length=LENGTH):
    return torch.randint(0, VOCABULARY, (batch, length))


def training_step(model, optimizer, ids, labels=None):
    """A Trainer's step: the outputs are dropped before backward, the gradients set to None."""

    def step():
        loss = model(input_ids=ids, labels=ids if labels is None else labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


QUICK = {"steps": 5, "warmup": 1, "budget_s": 20.0}


def workload(optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4))
    return model, optimizer(model.parameters(), lr=0.01, **options)


def trainer(model, optimizer):
    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def batches(count=40, size=8):
    return [torch.randn(size, 16) for _ in range(count)]


def everything(model, optimizer):
    """All that training changes, as comparable values."""
    tensors = {**model.state_dict(), **{f"grad {n}": p.grad for n, p in model.named_parameters()}}
    return copy.deepcopy(
        (
            {name: None if t is None else t.clone() for name, t in tensors.items()},
            optimizer.state_dict(),
            torch.get_rng_state(),
            random.getstate(),
            numpy.random.get_state(),
            [module.training for module in model.modules()],
        )
    )


def same(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, numpy.ndarray):
        return numpy.array_equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second
