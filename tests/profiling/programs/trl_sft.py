"""TRL's SFTTrainer on rows of tokens."""

import tempfile

from datasets import Dataset
from models import WORDS, texts, tiny_llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(float(logs["loss"]).hex())


set_seed(0)
words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
dataset = Dataset.from_dict({"input_ids": [ids.tolist() for ids in texts(48)]})
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, per_device_train_batch_size=4, max_steps=12, logging_steps=1, report_to=[],
        disable_tqdm=True, save_strategy="no", use_cpu=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    SFTTrainer(
        tiny_llama(), arguments, train_dataset=dataset, processing_class=tokenizer,
        callbacks=[Printed()],
    ).train()  # fmt: skip
