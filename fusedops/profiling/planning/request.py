"""`Request`: the checked arguments of `fusedops.memory`, except for the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusedops.functional.quantized_linear import FORMATS

__all__ = ["Request"]

MODES = "train", "forward", "generate"
OPTIMIZERS = "adamw", "adamw8bit", "sgd", None
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
            self._whole("batch", "an int")
            self._whole("length", "an int")
        self._whole("world", "an int")
        if self.lora_rank is not None:
            self._whole("lora_rank", "None or an int")
        for name in ("checkpoint", "patched"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(TypeError, name, "True or False")
        self._one_of("mode", MODES)
        self._one_of("optimizer", OPTIMIZERS)
        self._one_of("strategy", STRATEGIES)
        self._one_of("quantize", (None, *FORMATS))
        given = DTYPES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        if given is not None and given not in DTYPES.values():
            self._refuse(ValueError, "dtype", f"None or one of {', '.join(DTYPES)}")
        object.__setattr__(self, "dtype", given)
        if self.checkpoint and self.mode != "train":
            raise ValueError(f"memory: checkpoint=True needs mode 'train', got {self.mode!r}")

    def _check_tensors(self, batch: Mapping[str, Any]) -> None:
        if not any(isinstance(x, Tensor) for x in tree_leaves(dict(batch))):
            raise ValueError(f"memory: batch must have tensors, got {sorted(batch)}")
        if self.length is not None:
            self._refuse(ValueError, "length", "None if batch is a dict of tensors")
        if self.mode == "generate":
            raise ValueError("memory: mode 'generate' needs batch and length as ints, got a dict")

    def _whole(self, name: str, kind: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            self._refuse(TypeError, name, f"{kind} of 1 or more")
        if value < 1:
            self._refuse(ValueError, name, f"{kind} of 1 or more")

    def _one_of(self, name: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str | None) or value not in choices:
            self._refuse(ValueError, name, f"one of {', '.join(map(repr, choices))}")

    def _refuse(self, kind: type[Exception], name: str, what: str) -> None:
        raise kind(f"memory: {name} must be {what}, got {getattr(self, name)!r}")

    @property
    def trains(self) -> bool:
        return self.mode == "train"
