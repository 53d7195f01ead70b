"""Rotary functions' formulas and signatures, in terms of `rotary_embedding`.

function(q, k, cos, sin, unsqueeze_dim=1)       transformers
function(x, cos, sin), function(x, sin, cos)    litgpt, nanochat; timm
function(q, k, table), function(x, table)       Llama's complex numbers, gpt-fast's pairs
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["CANDIDATES", "LAYOUTS", "PACKS", "Layout", "Operands", "Rotation", "Signature"]


def _full(table: Tensor) -> Tensor:
    return table


def _twice(table: Tensor) -> Tensor:
    """Repeats half a table for both halves of a head."""
    return torch.cat([table, table], -1)


def _neighbours(table: Tensor) -> Tensor:
    """Repeats each entry of half a table for pairs of neighbours."""
    return table.repeat_interleave(2, -1)


def _first_half(table: Tensor) -> Tensor:
    return _neighbours(table[..., : table.shape[-1] // 2])


# How cos and sin are passed: (the arguments made of cos and sin, cos and sin of the arguments)
PACKS: dict[str, tuple[Callable, Callable]] = {
    "cos, sin": (lambda cos, sin: (cos, sin), lambda cos, sin: (cos, sin)),
    "sin, cos": (lambda cos, sin: (sin, cos), lambda sin, cos: (cos, sin)),
    "sides": (
        lambda cos, sin: (torch.cat([sin, cos], -1),),
        lambda table: table.chunk(2, -1)[::-1] if table.shape[-1] % 2 == 0 else None,
    ),
    "pairs": (
        lambda cos, sin: (torch.stack([cos, sin], -1),),
        lambda table: table.unbind(-1) if table.dim() and table.shape[-1] == 2 else None,
    ),
    "complex": (
        lambda cos, sin: (torch.complex(cos, sin),),
        lambda table: (table.real, table.imag) if table.is_complex() else None,
    ),
}


class Operands(NamedTuple):
    """`rotary_embedding`'s arguments for a call."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    dim: int


@dataclass(frozen=True)
class Layout:
    """The shape of a table for heads [B, H, T, width], or [B, T, H, width] with heads=2.

    rank: 2 for [T, n], 3 for [B, T, n], 4 with a dimension of 1 for the heads. batch: whether B is
    the heads' batch, else 1. cut: whether the function takes the first T rows of a longer table.
    """

    heads: int
    rank: int
    batch: bool = False
    cut: bool = False

    def rows(self, table: Tensor, x: Tensor) -> Tensor | None:
        """The table as [B or 1, T, n]; None if it is not of this layout for x."""
        if x.dim() != 4 or table.dim() != self.rank:
            return None
        if self.rank == 4 and table.shape[self.heads] != 1:
            return None
        rows = table[None] if self.rank == 2 else table
        rows = rows.squeeze(self.heads) if self.rank == 4 else rows
        length = x.shape[3 - self.heads]
        rows = rows[:, :length] if self.cut else rows
        fits = rows.shape[:2] == (x.shape[0] if self.batch else 1, length)
        return rows if fits else None

    def table(self, rows: Tensor) -> Tensor:
        """A table of this layout from [B or 1, T, n]."""
        if self.cut:
            rows = torch.cat([rows, rows[:, :2] + 1], 1)
        return rows.unsqueeze(self.heads) if self.rank == 4 else rows[0] if self.rank == 2 else rows


LAYOUTS = [
    *(Layout(heads, 2, cut=cut) for heads in (1, 2) for cut in (True, False)),
    *(Layout(heads, rank, batch) for heads in (1, 2) for rank in (3, 4) for batch in (True, False)),
]


@dataclass(frozen=True)
class Signature:
    """A function's parameters: `tensors` to rotate (2: q and k; 1), then the tables, packed.

    The layouts are those in which the function was run.
    """

    names: tuple[str, ...]
    tensors: int
    pack: str
    layouts: tuple[Layout, ...] = ()

    def operands(self, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        """The operands of a call; None if it is not of this signature."""
        named = self.names[len(args) :]
        values = [*args, *(kwargs.get(name) for name in named)]
        if len(values) != len(self.names) or not all(isinstance(v, Tensor) for v in values):
            return None
        if any(type(v) is not bool for name, v in kwargs.items() if name not in named):
            return None
        heads, packed = values[: self.tensors], values[self.tensors :]
        unpacked = PACKS[self.pack][1](*packed)
        if unpacked is None:
            return None
        for layout in self.layouts:
            placed = [layout.rows(table, x) for table in unpacked for x in heads]
            rows = [t for t in placed if t is not None]
            if len(rows) == len(placed):
                cos, sin = rows[0], rows[-1]
                # No heads: a gradient for them would be one more pass over x.
                k = heads[1] if self.tensors == 2 else heads[0].detach().narrow(layout.heads, 0, 0)
                return Operands(heads[0], k, cos, sin, layout.heads)
        return None

    def taking_both(self, function: Callable, layout: Layout) -> Callable:
        """The function of (q, k, cos, sin) that calls this one; cos and sin: [B or 1, T, n]."""

        def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            tables = PACKS[self.pack][0](layout.table(cos), layout.table(sin))
            if self.tensors == 2:
                return function(q, k, *tables)
            return function(q, *tables), function(k, *tables)

        return run


@dataclass(frozen=True)
class Rotation:
    """A rotary function's formula: `rotary_embedding` with a table made from cos and sin.

    back: whether results have q's and k's dtypes whatever the table's dtype is. partial: whether it
    takes a table narrower than a head. cast: whether autocast changes a dtype. keeps: whether
    results have q's memory layout. dim: where it unsqueezes cos by default. sign: sin's factor.
    signature: None for q, k, cos and sin, and an unsqueeze_dim.
    """

    interleaved: bool
    table: Callable[[Tensor], Tensor] = _full
    sign: int = 1
    dim: int = 1
    back: bool = False
    partial: bool = False
    cast: bool = False
    keeps: bool = True
    signature: Signature | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that take the operands."""
        return ("q", "k", "cos", "sin") if self.signature is None else self.signature.names

    @property
    def tensors(self) -> int:
        return 2 if self.signature is None else self.signature.tensors

    def operands(self, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        """The operands of a call of the function; None if the function must run."""
        if self.signature is not None:
            return self.signature.operands(args, kwargs)
        dim = kwargs.get("unsqueeze_dim", self.dim)
        if len(args) != 4 or not kwargs.keys() <= {"unsqueeze_dim"}:
            return None
        q, k, cos, sin = args
        return Operands(q, k, cos, sin, dim)

    def by(self, run: Callable, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int | None):
        """The results computed by `run`: the fused function or its reference."""
        dim = self.dim if dim is None else dim
        tables = self.table(cos), self.table(sin if self.sign > 0 else -sin)
        results = run(q, k, *tables, unsqueeze_dim=dim, interleaved=self.interleaved)
        return (results[0].to(q.dtype), results[1].to(k.dtype)) if self.back else results

    def takes(self, width: int, table: int) -> bool:
        """Whether a head of this width goes with a table of that width."""
        whole = table * (2 if self.halves else 1)
        return whole == width or (self.partial and whole < width)

    @property
    def halves(self) -> bool:
        """Whether the table has an entry for a pair."""
        return self.table in (_twice, _neighbours)


CANDIDATES = [
    Rotation(False),  # Llama
    Rotation(True),  # Cohere
    Rotation(True, _first_half),  # GLM
    Rotation(False, _twice),  # gpt-oss
    Rotation(True, _neighbours),
]
