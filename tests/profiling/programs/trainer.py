"""transformers' Trainer."""

import tempfile

from models import rows, tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(float(logs["loss"]).hex())


set_seed(0)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, max_steps=12, logging_steps=1, report_to=[],
        disable_tqdm=True, save_strategy="no", use_cpu=True,
    )  # fmt: skip
    Trainer(tiny_llama(), arguments, train_dataset=rows(48), callbacks=[Printed()]).train()
