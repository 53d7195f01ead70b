"""transformers' Trainer with fusedops: a callback patches the model, AdamW8bit trains it.

    python examples/trainer.py          # a Llama of 10.8M parameters; about two minutes
    python examples/trainer.py --tiny   # seconds

Expect the report before training, a falling loss, and one log with "fusedops/tokens_per_s",
"fusedops/mfu" and "fusedops/peak_mib", which TensorBoard and the other loggers get too. What the
Trainer saves loads without fusedops: the last lines load it and compare the logits.

The Trainer's default optimizer, adamw_torch_fused, is fused by torch already. AdamW8bit is here for
its state of 2 bytes a parameter.
"""

import logging
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fusedops
from fusedops.integrations.transformers import FusedOpsCallback

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH = (12, 2, 64) if TINY else (100, 4, 256)
HIDDEN, LAYERS = (64, 2) if TINY else (384, 6)


class SourceCode(torch.utils.data.Dataset):
    """The standard library's source in pieces, one token per byte."""

    def __init__(self):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        source = b"".join(file.read_bytes() for file in files)
        text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
        self.pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, i):
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


config = LlamaConfig(
    vocab_size=256,
    hidden_size=HIDDEN,
    intermediate_size=HIDDEN * 8 // 3,
    num_hidden_layers=LAYERS,
    num_attention_heads=HIDDEN // 64,
)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            logging_steps=STEPS // 4,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=SourceCode(),
        # Shown at WARNING, because Python hides INFO unless the program configures logging.
        callbacks=[FusedOpsCallback(profile=5, log_level=logging.WARNING)],
        optimizer_cls_and_kwargs=(fusedops.optim.AdamW8bit, {"lr": 4e-4}),
    )
    trainer.train()
    trainer.save_model(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder).eval()

tokens = SourceCode()[0]["input_ids"][None]
with torch.no_grad():
    difference = (loaded(tokens).logits - trainer.model.eval()(tokens).logits).abs().max()
print(f"the saved model, without fusedops: logits differ by {difference:.1e} at most")
