"""Triton experts: sorts rows by expert on the GPU, without making the host wait."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Routing"]


@dataclass(frozen=True)
class Routing:
    """A token's choices (slots), sorted by expert; a row is a slot in that order.

    order [rows]: each row's slot. places [rows]: each slot's row. bounds [experts + 2]: experts'
    first rows; the last two enclose the slots without expert. index, weights: [tokens, choices].
    """

    index: Tensor
    weights: Tensor
    experts: int
    order: Tensor
    places: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, index: Tensor, weights: Tensor, experts: int) -> "Routing":
        index = index.contiguous()
        sorted_, order = index.flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        starts = torch.arange(experts + 2, device=order.device)
        bounds = torch.searchsorted(sorted_, starts)
        return cls(index, weights.float().contiguous(), experts, order, places, bounds)

    @property
    def rows(self) -> int:
        return len(self.order)

    @property
    def choices(self) -> int:
        return self.index.shape[1]

    def tiles(self, size: int) -> Tensor:
        """[3, tiles]: each tile's expert, first row and end; -1 for a tile that is not needed.

        Its expert is `experts` if the rows have none.
        """
        counts = self.bounds.diff()
        needed = (counts + size - 1) // size
        ends = needed.cumsum(0)
        limit = -(-self.rows // size) + self.experts + 1
        number = torch.arange(limit, device=counts.device)
        expert = torch.searchsorted(ends, number, right=True)
        held = expert.clamp(max=self.experts)
        first = self.bounds[held] + (number - (ends - needed)[held]) * size
        end = torch.minimum(first + size, self.bounds[held + 1])
        return torch.stack([torch.where(expert > self.experts, -1, expert), first, end])

    def of_rows(self, slots: Tensor) -> Tensor:
        """The numbers of all rows."""
        return slots.flatten()[self.order]
