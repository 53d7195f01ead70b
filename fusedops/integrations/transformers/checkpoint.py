"""Says whether a checkpoint's files have a layer's codes, its floats or nothing."""

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from fusedops.nn import QuantizedExperts, QuantizedLinear

__all__ = [
    "CODES",
    "FLOATS",
    "NOTHING",
    "QWEIGHT",
    "RESIZED",
    "Checkpoint",
    "is_body",
    "saved_path",
    "shared_tail",
    "spellings",
]

QWEIGHT = ".qweight"
CODES, FLOATS, NOTHING, RESIZED = "codes", "floats", "nothing", "codes of another shape"


class Checkpoint:
    """The tensors in a checkpoint's files, by the model's names; on meta, so nothing is read."""

    def __init__(
        self, files: Iterable[str], model: Any, conversions: list, modules: dict[str, Any]
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.files: dict[str, str] = {}
        names = model.state_dict()
        for path, module in modules.items():
            names |= {f"{path}.{name}": tensor for name, tensor in module.state_dict().items()}
        rename = _renaming(model, conversions, names)
        self.resized: dict[str, tuple[str, Any, Any]] = {}  # path -> error, shapes here and there
        self.converted: set[str] = set()  # made of several tensors: one expert's, another shape's
        for file in files:
            for key, tensor in _tensors(file).items():
                name, converted = rename(key)
                self.tensors[name], self.files[name] = tensor, file
                self.converted |= {name} if converted else set()
        self.folder = os.path.dirname(next(iter(self.files.values()), ""))
        codes = (name.removesuffix(QWEIGHT) for name in self.tensors if name.endswith(QWEIGHT))
        self.paths = {name.rpartition(".")[0] for name in self.tensors}
        self.renamed = not any(is_body(path, model) for path in self.paths)
        self.codes = {shared_tail(path, self.renamed): path for path in codes if "." in path}

    def holds(self, path: str, module: QuantizedLinear | QuantizedExperts) -> str:
        """CODES, FLOATS, NOTHING or RESIZED of a quantized module, which may be on meta.

        RESIZED is a layer whose codes are those of other sizes: `resized` has the error for it.
        Raises ValueError if codes are missing or do not fit the module otherwise.
        """
        codes = {f"{path}.{name}": tensor for name, tensor in module.named_buffers()}
        missing = [name for name in codes if name not in self.tensors]
        if not missing:
            if unfit := self._unfit(path, module, codes):
                self.resized[path] = unfit, *self._shapes(path, module)
                return RESIZED
            return CODES
        if len(missing) < len(codes):
            problem = f"{self.folder} has no {' and '.join(missing)}"
            raise ValueError(self._unlike(path, module, f"it has {' and '.join(codes)}", problem))
        floats = module.stacks() if isinstance(module, QuantizedExperts) else ["weight"]
        if any(f"{path}.{name}" in self.tensors for name in floats):
            return FLOATS
        shared = shared_tail(path, self.renamed)
        if shared and (other := self.codes.get(shared)):
            raise ValueError(
                f"fusedops: {self.folder} has no weights for {path}, but it has codes of {other}. "
                "If this is the same layer, pass a key_mapping to from_pretrained, such as "
                f"{{'^{other.partition('.')[0]}': '{path.partition('.')[0]}'}}"
            )
        return NOTHING

    def has_part_of(self, path: str) -> bool:
        """Whether there is a bias of the module at a path, or what PEFT had wrapped there."""
        return bool({path, f"{path}.base_layer"} & self.paths)

    def _unfit(self, path: str, module: Any, codes: dict[str, Tensor]) -> str:
        """What is wrong if a layer has codes of other sizes; raises if it has other codes."""
        resized = ""
        for name, empty in codes.items():
            stored = self.tensors[name]
            misshapen = stored.shape != empty.shape and name not in self.converted
            if stored.dtype != empty.dtype or (misshapen and not resized):
                problem = f"{self.files[name]} has {_described(stored)}"
                needs = f"{name} must be {_described(empty)}"
                unfit = self._unlike(path, module, needs, problem)
                if stored.dtype != empty.dtype or name != path + QWEIGHT:
                    raise ValueError(unfit)
                resized = unfit
        return resized

    def _shapes(self, path: str, layer: Any) -> tuple[list[int], list[int]]:
        """The shapes of a layer's weight in the file and in the model."""
        # nf4's codes are one list, so rows of the model's length are assumed.
        rows, columns = layer.out_features, layer.in_features
        numbers = rows * columns // layer.qweight.numel()  # in one element of codes
        stored = self.tensors[path + QWEIGHT]
        if layer.qweight.shape[0] == rows:
            return [stored.shape[0], stored.shape[1] * numbers], [rows, columns]
        whole, rest = divmod(stored.numel() * numbers, columns)
        return [whole, columns] if not rest else [stored.numel() * numbers], [rows, columns]

    def _unlike(self, path: str, module: Any, needs: str, problem: str) -> str:
        return (
            f"fusedops: {path} is quantized to {module.format!r} in the config, so {needs}, but "
            f"{problem}. Load it with the format, the group_size and the model's sizes that it was "
            "saved with; if they are right, save the quantized model again"
        )


def is_body(path: str, model: Any) -> bool:
    """Whether a path is in the base model, which classes with other heads share."""
    prefix = model.base_model_prefix
    return not hasattr(model, prefix) or path.startswith(f"{prefix}.")


def shared_tail(path: str, renamed: bool) -> str:
    """A path without its first name, for layers that other classes may keep under another one.

    These are layers of a body. renamed: none of the checkpoint's paths is in the model's body, so
    the body has another name there. A layer with an index is in a body too. Empty for all others:
    they may be a head's, whose names (such as dense) do not identify a layer.
    """
    rest = path.partition(".")[2]
    indexed = any(name.isdigit() for name in rest.split(".")[:-1])
    return rest if renamed or indexed else ""


def saved_path(path: str) -> str:
    """A layer's path after PEFT's merge_and_unload."""
    return path.replace(".base_layer", "")


def spellings(path: str, model: Any) -> list[str]:
    """A path as it is in the model, in its class with a head, and in its base model."""
    prefix = f"{model.base_model_prefix}."
    return [path, prefix + path, path.removeprefix(prefix)]


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tensors(file: str) -> dict[str, Tensor]:
    from transformers.modeling_utils import load_state_dict  # imports this module's package

    return load_state_dict(file, map_location="meta")


def _renaming(
    model: Any, conversions: list, names: dict[str, Tensor]
) -> Callable[[str], tuple[str, bool]]:
    """A function that gives the model's name for a checkpoint's, as transformers' loader does.

    It also says whether the loader converts the tensor.
    """
    conversions = copy.deepcopy(conversions)  # they count their uses
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    prefix = model.base_model_prefix

    def rename(key: str) -> tuple[str, bool]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        return name, pattern is not None

    return rename
