"""`Request`: the checked arguments of `fusedops.memory`, except for the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusedops.functional.quantized_linear import FORMATS
from fusedops.measuring.arguments import check_one_of, check_types, check_whole

__all__ = ["Request"]

MODES = "train", "forward", "generate"
OPTIMIZERS = "adamw", "adamw8bit", "sgd"
STRATEGIES = "ddp", "zero1", "zero2", "zero3", "fsdp"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Request:
    """What to plan for. Raises TypeError or ValueError for an argument that no plan can have."""

    batch: Any  # an int, or a dict with tensors, and then length is None
    length: Any
    mode: str = "train"
    optimizer: str | None = "adamw"
    dtype: torch.dtype | str | None = None
    checkpoint: bool = False
    patched: bool = False
    quantize: str | None = None
    lora_rank: int | None = None
    world: int = 1
    strategy: str = "ddp"

    def __post_init__(self) -> None:
        if isinstance(self.batch, Mapping):
            self._check_tensors(self.batch)
        else:
            check_whole("memory", "batch", self.batch)
            check_whole("memory", "length", self.length)
        check_whole("memory", "world", self.world)
        if self.lora_rank is not None:
            check_whole("memory", "lora_rank", self.lora_rank)
        for name in ("checkpoint", "patched"):
            value = getattr(self, name)
            check_types("memory", **{name: (value, isinstance(value, bool), "True or False")})
        check_one_of("memory", "mode", self.mode, MODES)
        check_one_of("memory", "strategy", self.strategy, STRATEGIES)
        if self.optimizer is not None:
            check_one_of("memory", "optimizer", self.optimizer, OPTIMIZERS)
        if self.quantize is not None:
            check_one_of("memory", "quantize", self.quantize, FORMATS)
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            check_one_of("memory", "dtype", name, DTYPES)
            object.__setattr__(self, "dtype", DTYPES[name])
        if self.checkpoint and self.mode != "train":
            raise ValueError(f"memory: checkpoint=True needs mode 'train', got {self.mode!r}")

    def _check_tensors(self, batch: Mapping[str, Any]) -> None:
        if not any(isinstance(x, Tensor) for x in tree_leaves(dict(batch))):
            raise ValueError(f"memory: batch must have tensors, got {sorted(batch)}")
        if self.length is not None:
            raise ValueError(
                f"memory: length must be None if batch is a dict of tensors, got {self.length}"
            )
        if self.mode == "generate":
            raise ValueError("memory: mode 'generate' needs batch and length as ints, got a dict")

    @property
    def trains(self) -> bool:
        return self.mode == "train"
