"""A training loop with accelerate: bfloat16 autocast, gradient accumulation and fusedops.

    python examples/accelerate_loop.py          # a GPT-2 of 14M parameters; half a minute
    python examples/accelerate_loop.py --tiny   # seconds
    accelerate launch examples/accelerate_loop.py --tiny

Patch before `prepare`, so that every wrapper sees the patched model; patching later works too.
Embeddings keep a float32 state beside the 8-bit ones: of all layers they were the least stable in
8 bits (Dettmers et al., arXiv:2110.02861). Expect the report's summary, a falling loss, and 8 bytes
of state for each element of an embedding, and about 2 for the others.
"""

import sys
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import fusedops

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH = (8, 2, 64) if TINY else (60, 4, 256)
HIDDEN, LAYERS = (64, 2) if TINY else (384, 8)

files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
source = b"".join(file.read_bytes() for file in files)
text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=256,
    n_positions=LENGTH,
    n_embd=HIDDEN,
    n_layer=LAYERS,
    n_head=HIDDEN // 64,
    bos_token_id=None,
    eos_token_id=None,
)
model = GPT2LMHeadModel(config).train()
report = fusedops.patch(model)
print(report.summary)

embeddings = [model.transformer.wte.weight, model.transformer.wpe.weight]
others = [p for p in model.parameters() if all(p is not e for e in embeddings)]
optimizer = fusedops.optim.AdamW8bit(
    [
        {"params": others},
        {"params": embeddings, "state_dtype": "float32", "weight_decay": 0.0},
    ],
    lr=4e-4,
)

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
loader = DataLoader(pieces, batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, tokens in enumerate(islice(loader, STEPS)):
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if step % (STEPS // 4) == 0 or step == STEPS - 1:
        accelerator.print(f"step {step:3}  loss {loss.item():.3f}")

for group in optimizer.param_groups:
    count = sum(p.numel() for p in group["params"])
    state = [t for p in group["params"] for t in optimizer.state[p].values()]
    size = sum(t.nbytes for t in state)
    kind = group["state_dtype"]
    accelerator.print(f"{kind:8} state: {count:10,} parameters, {size / count:.2f} bytes each")
