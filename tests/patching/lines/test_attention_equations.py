"""Equations of einsum become products of queries and keys, and of weights and values."""

import torch
from axes import grid

from fusedops.patching.lines.attention.einsum import factors, values_of

SIZES = dict(zip("bhnijdqkle", (2, 3, 2, 4, 5, 6, 4, 5, 5, 1), strict=True))


def drawn(equation):
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    return [torch.randn([SIZES[letter] for letter in term]) for term in terms]


@grid(
    equation=[
        *("bhid,bhjd->bhij", "nqhd,nkhd->nhqk", "b i h d, b j h d -> b h i j"),
        *("bhid,bjd->bhij", "hid,bhjd->bhij", "bhjd,bhid->bhij"),
    ]
)
def test_equations_of_scores(equation):
    x, y = drawn(equation)
    if equation.startswith("bhjd"):  # its queries come second
        assert factors(equation, x, y) is None
        return
    q, k = factors(equation, x, y)
    torch.testing.assert_close(q @ k.mT, torch.einsum(equation, x, y))


@grid(equation=["bhid,bhje->bhij", "id,jd->ij", "bhid,bhjd", "bhid,bhjd->bhijd", "biid,bhjd->bhij"])
def test_other_equations_are_no_scores(equation):
    assert factors(equation, *drawn(equation)) is None


@grid(equation=["bhij,bhjd->bhid", "nhql,nlhd->nqhd", "bhij,bjd->bihd"])
def test_equations_of_values(equation):
    weights, v = drawn(equation)
    values, order = values_of(equation, weights, v)
    expected = torch.einsum(equation, weights, v)
    torch.testing.assert_close((weights @ values).permute(order), expected)


@grid(equation=["bhij,bhjd->bhd", "bhij,bhid->bhjd", "bhij,bhij->bhij"])
def test_other_equations_are_no_product_with_values(equation):
    assert values_of(equation, *drawn(equation)) is None
