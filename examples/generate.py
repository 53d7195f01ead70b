"""Generates text with an eager model, a patched one and `fusedops.low_latency`.

    python examples/generate.py          # a Llama of 25M parameters; about four minutes
    python examples/generate.py --tiny   # seconds; without torch.compile

The model first learns Python's source for two minutes, enough for fragments of words. Expect more
tokens a second, and equal text as long as no two next bytes are almost equally likely.
`fusedops.low_latency(model, quantize="nf4")` shrinks the weights too, and may change the text.
"""

import sys
import sysconfig
from pathlib import Path
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH, NEW = (8, 2, 64, 16) if TINY else (150, 4, 256, 128)
HIDDEN, LAYERS = (64, 2) if TINY else (512, 8)
PROMPT = b"def __init__(self, "


def train(model):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = b"".join(file.read_bytes() for file in files)
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    optimizer = fusedops.optim.AdamW8bit(model.parameters(), lr=6e-4, max_grad_norm=1.0)
    with fusedops.patched(model):  # the model is as before after the block
        for _ in range(STEPS):
            starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
            tokens = text[starts + torch.arange(LENGTH)]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"trained to a loss of {loss.item():.2f} nats a byte")


def generate(name, model):
    prompt = torch.tensor([list(PROMPT)])
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    settings["attention_mask"] = torch.ones_like(prompt)
    model.generate(prompt, **settings)  # the first call compiles, where something is compiled
    start = perf_counter()
    tokens = model.generate(prompt, **settings)[0]
    seconds = perf_counter() - start
    print(f"{name:12} {NEW / seconds:6.1f} tokens/s   {bytes(tokens.tolist())[:60]}")


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=HIDDEN,
    intermediate_size=HIDDEN * 8 // 3,
    num_hidden_layers=LAYERS,
    num_attention_heads=HIDDEN // 64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config)
train(model)
model.eval()

generate("eager", model)
report = fusedops.patch(model)
generate("patched", model)
report = fusedops.low_latency(model, compile=not TINY)
generate("low_latency", model)
print(report.summary)
print(report.notes[-1])
fusedops.unpatch(model)  # the dynamic cache and the eager code again
