"""Supervised fine-tuning with TRL's SFTTrainer, whose model FusedOpsCallback patches.

    python examples/trl_sft.py          # a Qwen3 of 7M parameters; about three minutes
    python examples/trl_sft.py --tiny   # seconds

The model learns to complete Python functions from the standard library, after their first line.
The tokenizer is made here, one token per byte. Expect one skipped site in the report: TRL computes
the loss with a fused head of its own. Everything else is fused, and the loss falls.
"""

import ast
import sys
import sysconfig
import tempfile
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

import fusedops
from fusedops.integrations.transformers import FusedOpsCallback

TINY = "--tiny" in sys.argv
STEPS, BATCH, LENGTH, ROWS = (4, 2, 64, 16) if TINY else (100, 8, 256, 2000)
HIDDEN, LAYERS = (64, 2) if TINY else (320, 6)


def functions():
    """Pairs of a function's first line and the rest of it."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(errors="replace")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                first, _, rest = ast.get_source_segment(source, node).partition("\n")
                yield {"prompt": first + "\n", "completion": rest}


symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
words = {symbol: i for i, symbol in enumerate(["<pad>", "<eos>", *symbols])}
bytewise = Tokenizer(models.BPE(words, merges=[]))
bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>")

config = Qwen3Config(
    vocab_size=len(words),
    hidden_size=HIDDEN,
    intermediate_size=3 * HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HIDDEN // 32,
    num_key_value_heads=2,
    head_dim=32,
    pad_token_id=0,
    eos_token_id=1,
)
callback = FusedOpsCallback()
with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model=Qwen3ForCausalLM(config),
        args=SFTConfig(
            output_dir=folder,
            max_steps=STEPS,
            max_length=LENGTH,
            per_device_train_batch_size=BATCH,
            logging_steps=STEPS // 4,
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list(list(functions())[:ROWS]),
        processing_class=tokenizer,
        callbacks=[callback],
        optimizer_cls_and_kwargs=(fusedops.optim.AdamW8bit, {"lr": 1e-3}),
    )
    trainer.train()
print(callback.report.summary)
for site in callback.report.skipped:
    print(f"skipped: {site.kind} at {site.path}: {site.reason}")
