"""A plain training loop, first eager and then with fusedops.

    python examples/plain_loop.py          # a Llama of 10.8M parameters; about two minutes
    python examples/plain_loop.py --tiny   # seconds

The text is the standard library's source, one token per byte. Three lines are fusedops': `patch`,
`AdamW8bit` and its `max_grad_norm`, which clips inside of the step. Expect equal losses up to
rounding, more tokens a second, and a quarter of the optimizer's bytes. Tokens/s come from two
separate runs here; `make demo` alternates the steps of both, and its ratio has an interval.
"""

import sys
import sysconfig
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH = (8, 2, 64) if TINY else (100, 4, 256)
HIDDEN, LAYERS = (64, 2) if TINY else (384, 6)


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def batches():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = b"".join(file.read_bytes() for file in files)
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
        yield text[starts + torch.arange(LENGTH)]


def train(name, model, optimizer, clip):
    losses, seconds = [], []
    for tokens in batches():
        start = perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(perf_counter() - start)
        losses.append(loss.item())
    print(f"{name:9} loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}", end="   ")
    print(f"{BATCH * LENGTH / median(seconds):7,.0f} tokens/s", end="   ")
    state = [t for entries in optimizer.state.values() for t in entries.values()]
    print(f"optimizer state {sum(t.nbytes for t in state) / 1e6:6.2f} MB")


model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, fused=True)
train("eager", model, optimizer, lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0))

model = build_model()
report = fusedops.patch(model)
optimizer = fusedops.optim.AdamW8bit(model.parameters(), lr=4e-4, max_grad_norm=1.0)
train("fusedops", model, optimizer, lambda parameters: None)

print(report)  # each site: what was there, and what runs now or why it was skipped
fusedops.unpatch(model)  # bit for bit the model's own code; the trained weights stay
