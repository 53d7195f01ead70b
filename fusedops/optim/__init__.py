"""Drop-in torch.optim optimizers: same arguments and state dicts, one pass over memory."""

from fusedops.optim.adamw import AdamW, AdamW8bit

__all__ = ["AdamW", "AdamW8bit"]
