"""low_latency patches a model for generation, with a static cache and a compiled decode step."""

import copy
import importlib.util
import operator
from typing import Any

from torch import nn

from fusedops.huge_pages import move_to_huge_pages
from fusedops.measuring.undo import Replaced, put_back
from fusedops.patching import PatchReport, patch

__all__ = ["low_latency"]

CACHES = ("static", "dynamic")
CONFIG = "generation_config"
SETTINGS = (
    "cache_implementation",
    "compile_config",
)  # what low_latency changes in it


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

    `unpatch(model)` undoes everything but the quantization and the copy. `save_pretrained` and
    pickle write the generation config without these settings. Returns patch's report.
    Raises TypeError for a model without `generate`, and ValueError for an unknown cache or format,
    or for compile=True with a dynamic cache.
    """
    _check(model, cache, compile)
    report = patch(model, quantize=quantize)
    put_back(model)  # an earlier call's config
    if cache == "static":
        _generate_statically(model, compile)
    report.notes.append(f"low_latency: {move_to_huge_pages(model)}")
    compiled = ", and torch.compile runs each token after the first" if compile else ""
    report.notes.append(f"low_latency: {cache} cache{compiled}")
    return report


def _generate_statically(model: nn.Module, compile: bool) -> None:
    """Gives the model another generation config; `unpatch` puts the earlier one back.

    A wrapper such as PEFT's passes `generate` on to the model inside, which reads its own config.
    """
    owner: Any = next(m for m in model.modules() if CONFIG in vars(m))
    config = _made_from(owner.generation_config, owner.generation_config)
    config.cache_implementation = "static"
    if compile:
        config.compile_config = _compiled_on_cpus()
    owner.generation_config = config


class _LowLatencyConfig(Replaced):
    """Mixed in before a generation config's class; files get the settings from before low_latency.

    What a user sets later is saved, except the two settings of low_latency.
    """

    _fusedops_earlier: Any  # set on the subclass

    def earlier(self) -> Any:
        return self._fusedops_earlier

    def _saved(self) -> Any:
        settings = {name: getattr(self.earlier(), name, None) for name in SETTINGS}
        return _with_attributes(type(self.earlier()), copy.deepcopy(vars(self)) | settings)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        self._saved().save_pretrained(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return operator.getitem, ([self._saved()], 0)

    def __copy__(self) -> Any:
        return _with_attributes(type(self), vars(self))

    def __deepcopy__(self, memo: dict) -> Any:
        return _made_from(copy.deepcopy(self.earlier(), memo), self)


def _made_from(earlier: Any, config: Any) -> Any:
    """A copy of the config that `unpatch` replaces by the earlier one."""
    cls = type(earlier)
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    namespace = named | {"_fusedops_earlier": earlier}
    config_class = type(cls.__name__, (_LowLatencyConfig, cls), namespace)
    return _with_attributes(config_class, copy.deepcopy(vars(config)))


def _with_attributes(cls: type, attributes: dict[str, Any]) -> Any:
    new: Any = object.__new__(cls)
    vars(new).update(attributes)
    return new


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
