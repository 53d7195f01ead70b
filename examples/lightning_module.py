"""A LightningModule trained with fusedops: a callback patches it during `fit`.

    python examples/lightning_module.py          # a Llama of 10.8M parameters; about a minute
    python examples/lightning_module.py --tiny   # seconds

Needs `pip install lightning`. Expect the report's summary and a falling loss. When `fit` ends, the
module is what it was, with trained weights; its checkpoints load without fusedops.
"""

import sys
import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops
from fusedops.integrations.lightning import FusedOpsCallback

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH = (8, 2, 64) if TINY else (100, 4, 256)
HIDDEN, LAYERS = (64, 2) if TINY else (384, 6)


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN * 8 // 3,
            num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // 64,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
        self.losses = []

    def training_step(self, tokens):
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return fusedops.optim.AdamW8bit(self.parameters(), lr=4e-4)


files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
source = b"".join(file.read_bytes() for file in files)
text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

L.seed_everything(0, verbose=False)
module, callback = LanguageModel(), FusedOpsCallback()
trainer = L.Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    gradient_clip_val=1.0,
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(pieces, batch_size=BATCH, shuffle=True))
print(callback.report.summary)
print(f"loss {module.losses[0]:.3f} -> {sum(module.losses[-5:]) / 5:.3f}")
