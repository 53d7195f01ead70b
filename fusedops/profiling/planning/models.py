"""Makes a model on the meta device from a config, name or module."""

import copy
import inspect
import json
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.nn import codes_as_parameters
from fusedops.patching import patch, quantize
from fusedops.profiling.planning.request import Request
from fusedops.profiling.planning.values import Values, on_meta, tensors_in

__all__ = [
    "check_positions",
    "config_of",
    "language_model_of",
    "meta_model",
    "raised",
    "startable",
    "takes",
]

WANTED = "a torch.nn.Module, a config of transformers, a folder, a config.json or a model type"
LANGUAGE = "Seq2SeqLM", "MaskedLM", "CausalLM"
POSITIONS = re.compile(r"(position_embeddings|embed_positions|wpe)$")  # absolute ones


def meta_model(model_or_config: Any, asked: Request, values: Values) -> Any:
    """The model that is asked for, on meta; what was given stays as it is.

    values: gets the numbers of small buffers.
    """
    if isinstance(model_or_config, nn.Module):
        model: Any = _on_meta(model_or_config, values)
        with values:
            model = model if asked.dtype is None else model.to(asked.dtype)
    else:
        model = _from_config(config_of(model_or_config), asked, values)
    if asked.length is not None:
        check_positions(model, asked.length, "memory")
    model.train(asked.trains)
    if asked.quantize is not None:
        quantize(model, asked.quantize)
    if asked.lora_rank is not None:
        model = _with_lora(model, asked.lora_rank)
    if asked.strategy == "fsdp":
        codes_as_parameters(model)
    if asked.checkpoint:
        _checkpoint(model)
    if asked.patched:
        patch(model)
    return model


def check_positions(model: nn.Module, length: int, caller: str) -> None:
    """Raises ValueError if the model has fewer absolute positions than a sequence's length."""
    for name, module in model.named_modules():
        few = getattr(module, "num_embeddings", length)
        if POSITIONS.search(name) and few < length:
            what = f"at most {few}, the positions that {type(model).__name__} has"
            raise ValueError(f"{caller}: length must be {what}, got {length}")


def config_of(given: Any, argument: str = "memory: model_or_config") -> Any:
    """A copy of a config, or the config that a name or path stands for.

    argument: the caller's name and its argument's, with which errors begin.

    A name is a folder, a JSON file, a model type of transformers, or a model of the Hugging Face
    hub that is in the local cache. Nothing is downloaded.
    """
    transformers = _transformers()
    if isinstance(given, transformers.PreTrainedConfig):
        return copy.deepcopy(given)
    if not isinstance(given, str | Path):
        got = type(given).__name__
        raise TypeError(f"{argument} must be {WANTED}, got {got}")
    path = Path(given)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"{argument} must be a folder with a config.json, got {str(given)!r}")
    if path.is_file():
        return _read(path, argument)
    config_classes = transformers.CONFIG_MAPPING
    if str(given) in config_classes:
        return config_classes[str(given)]()
    try:
        return transformers.AutoConfig.from_pretrained(str(given), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{argument} must be a folder, a config.json, a model type of transformers or a model "
            f"in the local cache of the hub, got {str(given)!r}"
        ) from error


def _read(path: Path, argument: str) -> Any:
    config_classes = _transformers().CONFIG_MAPPING
    try:
        values = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{argument} must be a file of JSON, got {str(path)!r}: {error}"
        ) from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in config_classes:
        what = "a config with a model_type that transformers knows"
        raise ValueError(f"{argument} must be {what}, got {kind!r} in {str(path)!r}")
    return config_classes[kind].from_dict(values)


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "memory: configs and names need transformers (pip install fusedops[hf])"
        ) from error
    return transformers


def _from_config(config: Any, asked: Request, values: Values) -> nn.Module:
    dtype = asked.dtype or getattr(config, "dtype", None)
    cls = _class_of(config)
    if cls.config_class is getattr(config, "sub_configs", {}).get("text_config"):
        config = config.get_text_config()
    try:
        with on_meta(values):
            model = cls._from_config(startable(config), dtype=dtype)
    except Exception as error:
        raise RuntimeError(
            f"memory: model_or_config must be a config that builds {cls.__name__}, which raised "
            f"{raised(error)}"
        ) from error
    if any(not t.is_meta for t in _tensors_of(model)):  # of torch.normal or torch.Tensor
        model = _on_meta(model, values)
    for p in model.parameters():
        values.forget(p)
    return model


def startable(config: Any) -> Any:
    """The config; that of an encoder and decoder gets a first token if it has none."""
    is_pair = getattr(config, "is_encoder_decoder", False)
    if is_pair and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _class_of(config: Any) -> Any:
    """The class that the config names, or the one with a language or classification head."""
    transformers = _transformers()
    named = getattr(config, "architectures", None) or [""]
    if cls := getattr(transformers, named[0], None):
        return cls
    for cls in _with_heads(config, (*LANGUAGE, "ImageClassification")):
        return cls
    return transformers.AutoModel._model_mapping[type(config)]


def language_model_of(config: Any) -> Any:
    """The class with a language modelling head that the config names, else the first; or None."""
    classes = list(_with_heads(config, LANGUAGE))
    named = getattr(config, "architectures", None) or [""]
    return next((c for c in classes if c.__name__ == named[0]), classes[0] if classes else None)


def _with_heads(config: Any, heads: tuple[str, ...]) -> Iterator[Any]:
    for head in heads:
        mapping = getattr(_transformers(), f"AutoModelFor{head}")._model_mapping
        if type(config) in mapping:
            yield mapping[type(config)]


def _on_meta(model: nn.Module, values: Values) -> nn.Module:
    """A copy of a model whose tensors are on meta; none of them is copied."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        if hasattr(p, "_local_tensor"):
            raise TypeError("memory: model_or_config must not be sharded, got DTensor parameters")
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
    for t in _tensors_of(model):
        if id(t) not in memo:
            memo[id(t)] = copied = t.detach().to("meta")
            if not t.is_meta:
                values.keep(copied, t.detach())
    return copy.deepcopy(model, memo)


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that are neither."""
    return tensors_in([vars(module) for module in model.modules()])


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "memory: lora_rank needs peft (pip install fusedops[hf])"
        ) from error
    with torch.device("meta"):
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))  # type: ignore[arg-type]


def _checkpoint(model: Any) -> None:
    names = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    enable = next((f for name in names if callable(f := getattr(model, name, None))), None)
    if enable is None:
        raise ValueError(
            f"memory: checkpoint=True needs a model of transformers, got {type(model).__name__}"
        )
    enable()
    if getattr(model.config, "use_cache", False):  # as transformers does, which warns
        model.config.use_cache = False


def raised(error: Exception) -> str:
    """An error's type and message, and the line of the model's code that raised it."""
    message = str(error).partition("\n")[0]
    others = (*torch.__path__, str(Path(__file__).parents[2]))
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if not frame.filename.startswith(others)]
    at = (
        f" (at {Path(lines[-1].filename).name}:{lines[-1].lineno}: {lines[-1].line})"
        if lines
        else ""
    )
    return f"{type(error).__name__}: {message}{at}"


def takes(model: Any) -> list[str]:
    """The names that the model's forward takes; peft passes on what it is given."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return [*inspect.signature(base.forward).parameters]
