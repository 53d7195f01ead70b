"""Makes a planned step's inputs on the meta device: token ids, images, or the caller's batch."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fusedops.profiling.planning.models import takes
from fusedops.profiling.planning.request import Request
from fusedops.profiling.planning.values import Values

__all__ = ["check_inputs", "ids_of", "inputs_of"]

IMAGE = 224
SPECIAL = "token_id", "token_ids", "token_index"  # ends of names in configs


def check_inputs(model: Any, asked: Request) -> None:
    """Raises ValueError if the model does not take what a step of this mode gives it."""
    names, got = takes(model), type(model).__name__
    if asked.mode == "generate":
        if not hasattr(model, "generate") or not {"input_ids", "past_key_values"} <= {*names}:
            what = "a model that generates with a cache"
            raise ValueError(f"memory: mode 'generate' needs {what}, got {got}")
    elif isinstance(asked.batch, Mapping) or "input_ids" in names or _takes_images(model):
        return
    else:
        raise ValueError(
            "memory: model_or_config must take input_ids or pixel_values, or batch must be a dict "
            f"of what it takes, got {got}.forward({', '.join(names)})"
        )


def inputs_of(model: Any, asked: Request, values: Values) -> dict[str, Any]:
    """What a training step or a forward calls the model with.

    values: gets the numbers of the caller's tensors.
    """
    if isinstance(asked.batch, Mapping):
        return tree_map(lambda x: _copied(x, values), dict(asked.batch))
    names, config = takes(model), getattr(model, "config", None)
    if _takes_images(model):
        given = {"pixel_values": _images(model, asked.batch)}
    else:
        given = {"input_ids": ids_of(model, asked.batch, asked.length)}
    if asked.trains and "labels" in names:
        given["labels"] = _labels(model, asked.batch, asked.length)
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids_of(model, asked.batch, asked.length)
    return given


def ids_of(model: Any, batch: int, length: int) -> Tensor:
    """Token ids without padding: all are the least that has no meaning of its own."""
    config: Any = getattr(model, "config", None)
    special = {*_numbers(config.to_dict())} if hasattr(config, "to_dict") else set()
    usual = next(i for i in range(len(special) + 1) if i not in special)
    return torch.full((batch, length), usual, dtype=torch.int64, device="meta")


def _numbers(config: Mapping[Any, Any]) -> Iterator[int]:
    """The ids that a config gives a meaning, those of its parts too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif str(name).endswith(SPECIAL):
            yield from value if isinstance(value, list) else [value]


def _images(model: Any, batch: int) -> Tensor:
    config = getattr(model, "config", None)
    size = getattr(config, "image_size", IMAGE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = batch, getattr(config, "num_channels", 3), height, width
    return torch.zeros(shape, dtype=next(model.parameters()).dtype, device="meta")


def _labels(model: Any, batch: int, length: int) -> Tensor:
    """A class per row or token, or the token ids themselves."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(base).__name__
    if "Classification" not in name:
        return ids_of(model, batch, length)
    shape = (batch, length) if "Token" in name else (batch,)
    return torch.zeros(shape, dtype=torch.int64, device="meta")


def _takes_images(model: Any) -> bool:
    name = "pixel_values"
    return getattr(model, "main_input_name", "") == name and name in takes(model)


def _copied(x: Any, values: Values) -> Any:
    """A value of the caller's batch: tensors on meta, with small ones' numbers."""
    if not isinstance(x, Tensor):
        return x
    t = x.detach().to("meta")
    if not x.is_meta:
        values.keep(t, x.detach())
    return t
