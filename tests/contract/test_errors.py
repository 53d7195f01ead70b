"""Errors name the operator, the argument, and the wanted and given value."""

import re

import numpy as np
import pytest
import torch

from contract.family import each
from fusedops import functional as F

X, W = torch.ones(3, 8), torch.ones(8)
HEADS = torch.ones(1, 2, 4, 8)


def _errors(family):
    yield from ((m, (m, call)) for m, call in (family.errors | family.kernel_errors).items())


@each("message,call", _errors)
def test_errors_name_operator_argument_wanted_and_got(message, call):
    with pytest.raises((RuntimeError, ValueError), match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: F.rms_norm(X, W),
            "rms_norm: normalized_shape must be a list or tuple of ints, got Tensor",
        ),
        (
            lambda: F.rms_norm(X, [8.0, None]),
            "rms_norm: normalized_shape must be a list or tuple of ints, "
            "got list of NoneType, float",
        ),
        (
            lambda: F.add_rms_norm(X, None, W),
            "add_rms_norm: residual must be a Tensor, got NoneType",
        ),
        (
            lambda: F.add_rms_norm(X, X, W, eps="a"),
            "add_rms_norm: eps must be a number or None, got str",
        ),
        (
            lambda: F.attention(HEADS, HEADS, HEADS, causal="yes"),
            "attention: causal must be a bool, got str",
        ),
        (lambda: F.linear(X, X, activation=3), "linear: activation must be a str or None, got int"),
        (
            lambda: F.cross_entropy(X, [1, 2, 3]),
            "cross_entropy: target must be a Tensor, got list of int",
        ),
    ],
)
def test_a_wrong_type_is_named(call, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("eps", [1, np.float32(0.5), torch.tensor(0.5)])
def test_numbers_of_other_types_are_numbers(eps):
    assert torch.equal(F.rms_norm(X, [8], eps=eps), F.rms_norm(X, [8], eps=float(eps)))
