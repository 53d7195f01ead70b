"""low_latency: patch for generation, with a static cache and a compiled decode step."""

import copy
import importlib.util
from functools import partial
from typing import Any

from torch import nn

from fusedops.huge_pages import move_to_huge_pages
from fusedops.patching import PatchReport, patch
from fusedops.patching.core.undo import at_unpatch, run_at_unpatch

__all__ = ["low_latency"]

CACHES = ("static", "dynamic")


def low_latency(
    model: nn.Module, *, cache: str = "static", compile: bool = True, quantize: str | None = None
) -> PatchReport:
    """Sets a transformers model up to generate tokens with as little delay as it can.

    Patches the model. `model.generate` then uses a static cache and runs torch.compile's code for
    each token after the first, by the model's own `generation_config`; arguments of `generate` win
    over it. The first generation compiles, which takes seconds to a minute, and so does one whose
    cache needs another size. Weights on the CPU are copied into huge pages, where Linux has them:
    one token's products read every weight, and reading pages of 4 KiB is slower.

    cache: "static", or "dynamic" for the config's own, which cannot be compiled. quantize: a format
    of `fusedops.quantize`, such as "nf4", for the linears' weights.

    `unpatch(model)` undoes everything but the quantization and the copy. Returns patch's report.
    Raises TypeError for a model without `generate`, and ValueError for an unknown cache or format,
    or for compile=True with a dynamic cache.
    """
    _check(model, cache, compile)
    report = patch(model, quantize=quantize)
    run_at_unpatch(model)  # an earlier call's config
    if cache == "static":
        _generate_statically(model, compile)
    report.notes.append(f"low_latency: {move_to_huge_pages(model)}")
    how = ", and torch.compile runs each token after the first" if compile else ""
    report.notes.append(f"low_latency: {cache} cache{how}")
    return report


def _generate_statically(model: Any, compile: bool) -> None:
    """Gives the model another generation config; `unpatch` puts the earlier one back."""
    at_unpatch(model, partial(_give, config=model.generation_config))
    config = copy.deepcopy(model.generation_config)
    config.cache_implementation = "static"
    if compile:
        config.compile_config = _compiled_on_cpus()
    model.generation_config = config


def _give(model: Any, config: Any) -> None:
    model.generation_config = config


def _check(model: Any, cache: str, compile: bool) -> None:
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise TypeError(f"low_latency: model must be a torch.nn.Module, got {got}")
    has = hasattr(model, "generate") and getattr(model, "generation_config", None) is not None
    if not has or importlib.util.find_spec("transformers") is None:
        got = type(model).__name__
        raise TypeError(
            f"low_latency: model must be a transformers model that generates, got {got}"
        )
    if cache not in CACHES:
        raise ValueError(f"low_latency: cache must be one of {', '.join(CACHES)}, got {cache!r}")
    if compile and cache == "dynamic":
        raise ValueError('low_latency: compile must be False with cache="dynamic", which grows')


def _compiled_on_cpus() -> Any:
    """transformers compiles the decode step by itself on accelerators; on CPUs when told to."""
    from transformers import CompileConfig

    config: Any = CompileConfig(fullgraph=False, mode="default")
    config._compile_all_devices = True
    return config
