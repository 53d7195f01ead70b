"""Calls of patch whose warning, that nothing was fused, does not matter."""

import warnings


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)
