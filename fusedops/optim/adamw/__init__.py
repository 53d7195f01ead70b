"""The fused AdamW and AdamW8bit optimizers."""

from fusedops.optim.adamw.optimizer import AdamW, AdamW8bit

__all__ = ["AdamW", "AdamW8bit"]
