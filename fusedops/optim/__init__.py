"""torch.optim twins: same constructor, parameter groups and state dict, one pass over memory."""

from fusedops.optim.adamw import AdamW, AdamW8bit

__all__ = ["AdamW", "AdamW8bit"]
