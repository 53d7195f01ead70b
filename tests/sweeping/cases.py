"""A small Llama and its batches, for tests of fusedops.sweep and fusedops.tune."""

import pytest
import torch
from patching.architectures import PLAIN

WORDS = PLAIN["vocab_size"]


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**PLAIN))


def tokens(batch, length):
    ids = torch.randint(WORDS, (batch, length or 8))
    return {"input_ids": ids, "labels": ids}
