"""Makes from_pretrained refuse a checkpoint's codes where the model loads floats.

transformers would draw random weights for such layers, and only log that it did.
"""

import functools
from typing import Any

from transformers import modeling_utils
from transformers.modeling_utils import log_state_dict_report

__all__ = ["install", "refuse_codes"]

QWEIGHT = ".qweight"


def refuse_codes(model: Any, name: str | None, loading_info: Any) -> None:
    """Raises ValueError if a layer's weight is missing and its codes are in the checkpoint.

    name: the checkpoint's. loading_info: what transformers' loader has found.
    """
    extra, missing = loading_info.unexpected_keys, loading_info.missing_keys
    for key in sorted(key for key in extra if key.endswith(QWEIGHT)):
        path = key.removesuffix(QWEIGHT)
        format = _format(path, extra)
        if format and any(p in missing or f"{p}.weight" in missing for p in _places(model, path)):
            raise ValueError(
                f"from_pretrained: {name or 'the state dict'} has codes of {path} ({key}), but the "
                f"model loads this layer in floats. {_advice(model, path, format)}"
            )


def _format(path: str, names: set[str]) -> str:
    """The format of a layer's codes, by their names; empty if they are another package's."""
    if f"{path}.qzeros" in names or f"{path}.g_idx" in names:  # GPTQ and AWQ
        return ""
    if f"{path}.absmax" in names:
        return '"nf4"'
    if f"{path}.scales" not in names:
        return ""
    return '"int4"' if f"{path}.zeros" in names else '"int8" or "fp8"'


def _places(model: Any, path: str) -> list[str]:
    """Paths in the model that may be the layer's; transformers prefixes only expected names."""
    path = path.replace(".base_layer", "")  # PEFT's adapter around the layer
    prefix = f"{model.base_model_prefix}."
    return [path, f"{prefix}{path}", path.removeprefix(prefix)]


def _advice(model: Any, path: str, format: str) -> str:
    if getattr(model.config, "quantization_config", None) is None:
        return (
            f"Pass quantization_config=fusedops.QuantizationConfig(format), where format is "
            f"{format}, with the options that made the codes. `fusedops.quantize(model, format)` "
            "of a whole model, not of its parts, writes this config for save_pretrained"
        )
    return (
        f"Its quantization_config skips it: remove what names {path} from `skip`. "
        "`fusedops.quantize(model, format)` of the whole model writes the right config for "
        "save_pretrained"
    )


@functools.wraps(log_state_dict_report)
def _refuse_then_log(
    model: Any, pretrained_model_name_or_path: Any, *args: Any, loading_info: Any, **kwargs: Any
) -> None:
    refuse_codes(model, pretrained_model_name_or_path, loading_info)
    log_state_dict_report(
        model, pretrained_model_name_or_path, *args, loading_info=loading_info, **kwargs
    )


def install() -> None:
    """Makes transformers' loader refuse codes. Once is enough."""
    if not hasattr(modeling_utils.log_state_dict_report, "__wrapped__"):
        modeling_utils.log_state_dict_report = _refuse_then_log
