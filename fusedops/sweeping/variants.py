"""Makes variants of a model from names such as `compiled+patched`."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from fusedops.integrations.transformers.latency import low_latency
from fusedops.measuring.changes import CHANGES
from fusedops.measuring.snapshot import shared_copy
from fusedops.patching import quantize, unpatch
from fusedops.patching.quantize import check_options

__all__ = ["EAGER", "Variant", "variant"]

EAGER = "eager"
OPTIONS = ("group_size", "scale", "input_format", "compute")  # of quantize, left at their defaults
PARTS = ("patched", "compiled", "static", "low_latency", "quantized:FORMAT")
GENERATING = ("static", "low_latency")  # parts for mode "generate" alone


@dataclass(frozen=True)
class Variant:
    """A name such as "compiled+patched", and its parts."""

    name: str
    patched: bool = False
    compiled: bool = False
    static: bool = False
    low_latency: bool = False
    format: str | None = None

    def model(self, model: nn.Module) -> nn.Module:
        """The model as this variant runs it.

        A structure of its own, with the parameters and buffers of `model`, so that variants take
        turns without undoing each other; only quantized weights are new, and those of low_latency,
        which moves them. "eager" is unpatched.
        """
        copied = shared_copy(model, "sweep", of=() if self.low_latency else None)
        unpatch(copied)
        if self.format is not None:
            quantize(copied, self.format)
        if self.patched:
            _make("patch", copied)
        if self.low_latency:
            low_latency(copied)
        if self.compiled:
            _make("compile", copied)
        return copied

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of transformers' generate."""
        return {"cache_implementation": "static"} if self.static else {}


def _make(name: str, model: nn.Module) -> None:
    make = CHANGES[name].make
    assert make is not None
    make(model)


def variant(name: str, mode: str) -> Variant:
    """Reads a name: parts joined by "+". Raises ValueError for a part that is not known."""
    parts = [] if name == EAGER else name.split("+")
    options: dict[str, Any] = {}
    for part in parts:
        kind, _, format = part.partition(":")
        if kind == "quantized" and format:
            _check_format(format)
            options["format"] = format
        elif part in PARTS:
            options[part] = True
        else:
            accepted = f'"{EAGER}" or parts of {", ".join(PARTS)} joined by "+"'
            raise ValueError(f"sweep: variants must be {accepted}, got {name!r}")
    for part in GENERATING:
        if options.get(part) and mode != "generate":
            raise ValueError(f'sweep: variants with "{part}" need mode "generate", got {mode!r}')
    return Variant(name, **options)


def _check_format(format: str) -> None:
    try:
        check_options(format, dict.fromkeys(OPTIONS))
    except ValueError as error:
        raise ValueError(f"sweep: variants: {error}") from error
