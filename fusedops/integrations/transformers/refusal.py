"""Makes from_pretrained refuse a checkpoint's codes where the model loads floats.

transformers would draw random weights for such layers, and only log that it did.
"""

import functools
import inspect
import sys
from typing import Any

import torch

from fusedops.integrations.transformers.checkpoint import (
    QWEIGHT,
    is_body,
    saved_path,
    shared_tail,
    spellings,
)

__all__ = ["install", "refuse_codes", "report_resized"]

REFUSES = "_fusedops_refuses"  # our mark on the loader's function, also through others' wraps


def refuse_codes(model: Any, name: str | None, loading_info: Any) -> None:
    """Raises ValueError if a layer's weight is missing and its codes are in the checkpoint.

    name: the checkpoint's. loading_info: what transformers' loader has found.
    """
    extra, missing = loading_info.unexpected_keys, loading_info.missing_keys
    renamed = all(key in missing for key in model.state_dict() if is_body(key, model))
    floats = {key.removesuffix(".weight") for key in missing}  # experts' names have no more
    floats |= {shared_tail(path, renamed) for path in floats} - {""}
    for key in sorted(key for key in extra if key.endswith(QWEIGHT)):
        path = key.removesuffix(QWEIGHT)
        layer = saved_path(path)
        names = {*spellings(layer, model), shared_tail(layer, renamed)}
        if names & floats and (format := _format(path, extra)):
            raise ValueError(
                f"from_pretrained: {name or 'the state dict'} has codes of {path} ({key}), but the "
                f"model loads this layer in floats. {_advice(model, path, format)}"
            )


def report_resized(model: Any, ignore_mismatched_sizes: bool, loading_info: Any) -> None:
    """Reports layers whose codes have other sizes, as transformers reports floats of other sizes.

    Raises ValueError unless ignore_mismatched_sizes is true.
    """
    for path, (error, *shapes) in getattr(
        model.__dict__.get("hf_quantizer"), "resized", {}
    ).items():
        if not ignore_mismatched_sizes:
            raise ValueError(
                f"{error}. For a new layer in floats, pass ignore_mismatched_sizes=True to "
                "from_pretrained"
            )
        keys = loading_info.unexpected_keys
        keys -= {key for key in keys if key.rpartition(".")[0] == path}
        loading_info.missing_keys.discard(f"{path}.weight")
        loading_info.mismatched_keys.add((f"{path}.weight", *map(torch.Size, shapes)))


def _format(path: str, names: set[str]) -> str:
    """The format of a layer's codes, by their names; empty if they are another package's."""
    if f"{path}.qzeros" in names or f"{path}.g_idx" in names:  # GPTQ and AWQ
        return ""
    if f"{path}.absmax" in names:
        return '"nf4"'
    if f"{path}.scales" not in names:
        return ""
    return '"int4"' if f"{path}.zeros" in names else '"int8" or "fp8"'


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


def install() -> None:
    """Makes transformers' loader refuse codes. Once is enough."""
    loader: Any = sys.modules["transformers.modeling_utils"]
    report = loader.log_state_dict_report
    if hasattr(report, REFUSES):
        return

    @functools.wraps(report)
    def refuse_then_log(*args: Any, **kwargs: Any) -> None:
        call = inspect.signature(report).bind(*args, **kwargs).arguments
        report_resized(call["model"], call["ignore_mismatched_sizes"], call["loading_info"])
        refuse_codes(call["model"], call["pretrained_model_name_or_path"], call["loading_info"])
        report(*args, **kwargs)

    setattr(refuse_then_log, REFUSES, True)
    loader.log_state_dict_report = refuse_then_log
