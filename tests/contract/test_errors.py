"""Errors name the operator, the argument, and the wanted and given value."""

import pytest

from contract.family import each


def _errors(family):
    yield from ((m, (m, call)) for m, call in (family.errors | family.kernel_errors).items())


@each("message,call", _errors)
def test_errors_name_operator_argument_wanted_and_got(message, call):
    with pytest.raises((RuntimeError, ValueError), match=message):
        call()
