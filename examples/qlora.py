"""QLoRA on a CPU: a base model in nf4, loaded by transformers, with adapters by PEFT.

    python examples/qlora.py          # a Llama of 25M parameters; about four minutes
    python examples/qlora.py --tiny   # seconds

The base model first learns Python's source; a hub's checkpoint would take its place. Then its
frozen weights are loaded in 4 bits, and LoRA teaches it English, from pydoc's help pages. Expect
the weights at a seventh of their float32 bytes, a falling loss, and adapters of 2.5 MB.
"""

import sys
import sysconfig
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fusedops

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH = (6, 2, 64) if TINY else (100, 4, 256)
HIDDEN, LAYERS = (64, 2) if TINY else (512, 8)
SOURCE = b"".join(f.read_bytes() for f in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
ENGLISH = "\n".join(topics.values()).encode()


def train(model, text, lr):
    """Trains on pieces of a text, one token per byte; prints the loss before and after."""
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = fusedops.optim.AdamW8bit(trained, lr=lr, max_grad_norm=1.0)
    random, losses = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
        tokens = text[starts + torch.arange(LENGTH)]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"  loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}")


def size(model):
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) / 1e6


config = LlamaConfig(
    vocab_size=256,
    hidden_size=HIDDEN,
    intermediate_size=HIDDEN * 8 // 3,
    num_hidden_layers=LAYERS,
    num_attention_heads=HIDDEN // 64,
    use_cache=False,
)
model = LlamaForCausalLM(config)
fusedops.patch(model)
print(f"base model, {size(model):.1f} MB in float32, learns Python's source:")
train(model, SOURCE, lr=4e-4)

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    quantization = fusedops.QuantizationConfig("nf4")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)
    print(f"loaded in nf4: {size(model):.1f} MB")
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"LoRA trains {trained:,} parameters")  # PEFT's own total leaves out the codes
    report = fusedops.patch(model)  # after PEFT, so that it sees the adapters
    print(report.summary)
    print("adapters learn English:")
    train(model, ENGLISH, lr=2e-3)
    model.save_pretrained(folder)
    file = Path(folder, "adapter_model.safetensors")
    print(f"saved adapters: {file.stat().st_size / 1e6:.2f} MB")
