"""Lightning, whose optimizer's step runs forward and backward in a closure."""

import logging
import warnings

import lightning
import torch
from models import rows, tiny_llama
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_llama()

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        print(loss.item().hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    max_steps=12, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Module(), DataLoader(rows(48), batch_size=4))
