"""Defines a step's bytes by category: `StepBytes`, and `MemoryUse` for measured steps."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["MemoryUse", "StepBytes", "mebibytes"]


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The bytes of one step by category, each storage counted once.

    A category's number is the most bytes that it held at any time: parameters (frozen parameters
    are also counted in frozen), buffers, gradients, optimizer_state, inputs, activations (saved
    for backward), logits (with what the loss saves of their width), kv_cache. peak: the most bytes
    of all categories and temporaries together. temporaries: the rest of what was alive at the peak.
    at_peak: what was alive at the peak, by category; it adds up to peak. modules: bytes saved for
    backward, by module path. title: the table's first line.
    """

    title: str
    parameters: int
    frozen: int
    buffers: int
    gradients: int
    optimizer_state: int
    inputs: int
    activations: int
    logits: int
    kv_cache: int
    temporaries: int
    peak: int
    at_peak: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        named = {k: v for k, v in self.to_dict().items() if isinstance(v, int)}
        return _table(self.title, named, self.at_peak)


@dataclass(frozen=True, kw_only=True)
class MemoryUse(StepBytes):
    """The bytes of one step, measured.

    slack: on a CPU the process's resident memory after the step, less the bytes that were then
    alive. It has the interpreter, libraries, memory that the allocator keeps, and tensors that the
    step does not use. On a GPU what the caching allocator has reserved and no tensor uses.
    """

    title: str = "memory of a step"
    slack: int


def _table(title: str, named: Mapping[str, int], at_peak: Mapping[str, int]) -> str:
    """Lines of name, MiB, and MiB at the peak."""
    wide = max(map(len, named))
    lines = [f"{title}", f"{'':{wide}}  {'MiB':>12}  {'at peak':>12}"]
    for name, value in named.items():
        then = mebibytes(at_peak[name]) if name in at_peak else ""
        lines.append(f"{name:{wide}}  {mebibytes(value):>12}  {then:>12}".rstrip())
    return "\n".join(lines)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.2f}"
