"""Reads equations of einsum that are the two products of attention."""

from torch import Tensor

__all__ = ["factors", "values_of"]


def factors(equation: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """q and k as [.., length, width] of `b h i d, b h j d -> b h i j`, in any such order.

    A factor without one of the batch dimensions gets one of size 1. None for another equation.
    """
    inner, outer = _letters(equation)
    if len(inner) != 2 or len(outer) < 3:
        return None
    batch, i, j = outer[:-2], outer[-2], outer[-1]
    shared = [letter for letter in inner[0] if letter in inner[1] and letter not in outer]
    if len(shared) != 1 or i in inner[1] or j in inner[0]:
        return None
    q, k = (
        _arranged(x, inner[0], batch + i + shared[0]),
        _arranged(y, inner[1], batch + j + shared[0]),
    )
    return None if q is None or k is None else (q, k)


def values_of(equation: str, weights: object, v: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """v as [.., length, width] of `b h i j, b h j d -> b h i d`, and the result's order.

    The product of the weights and that v has the dimensions [.., i, d]; in the order, it is the
    equation's result. None for another equation.
    """
    inner, outer = _letters(equation)
    if len(inner) != 2 or len(inner[0]) < 3:
        return None
    batch, i, j = inner[0][:-2], inner[0][-2], inner[0][-1]
    widths = [letter for letter in inner[1] if letter not in inner[0]]
    if len(widths) != 1 or i in inner[1]:
        return None
    values, result = _arranged(v, inner[1], batch + j + widths[0]), batch + i + widths[0]
    if values is None or sorted(outer) != sorted(result):
        return None
    return values, tuple(result.index(letter) for letter in outer)


def _letters(equation: object) -> tuple[list[str], str]:
    """The factors' letters and the result's; empty if it has none, or a letter twice."""
    if not isinstance(equation, str) or "->" not in equation:
        return [], ""
    text, _, outer = equation.replace(" ", "").partition("->")
    inner = text.split(",")
    plain = all(term.isalpha() and len({*term}) == len(term) for term in (*inner, outer))
    return (inner, outer) if plain else ([], "")


def _arranged(t: Tensor, letters: str, order: str) -> Tensor | None:
    """t with its dimensions in this order; missing ones of size 1. The last two must be there."""
    if t.dim() != len(letters) or not {*letters} <= {*order} or not {*order[-2:]} <= {*letters}:
        return None
    t = t.permute([letters.index(letter) for letter in order if letter in letters])
    for at, letter in enumerate(order):
        if letter not in letters:
            t = t.unsqueeze(at)
    return t
