"""Calls a function, usually patch, and ignores its warnings."""

import warnings


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)
