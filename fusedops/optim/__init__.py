"""Drop-in replacements for torch.optim.AdamW that step in one pass over memory."""

from fusedops.optim.adamw import AdamW, AdamW8bit

__all__ = ["AdamW", "AdamW8bit"]
