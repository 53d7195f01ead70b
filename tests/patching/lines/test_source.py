"""patch rewrites a forward method with its decorators, closures and tracebacks, or skips it."""

import functools
import importlib.util
import inspect
import os
import traceback

import pytest
import torch

from fusedops.patching import patch
from patching.lines.residual_cases import Layer, N, build, close, residual_sites


class Raises(Layer):
    def forward(self, hidden):
        hidden = hidden + self.mix(hidden)
        hidden = self.norm(hidden)
        raise KeyError("here")


def test_traceback_and_source_are_the_models_own():
    model = build(Raises)
    patch(model)
    with pytest.raises(KeyError) as error:
        model(torch.zeros(2, N))
    frame = traceback.extract_tb(error.tb)[-1]
    assert (frame.filename, frame.line) == (__file__, 'raise KeyError("here")')
    assert inspect.getsource(type(model[0]).forward) == inspect.getsource(Raises.forward)


def doubled(function):
    @functools.wraps(function)
    def wrapper(self, hidden, **kwargs):
        return 2 * function(self, hidden, **kwargs)

    return wrapper


class Base(Layer):
    def forward(self, hidden, scale=1.0):
        return self.up(hidden) * scale


class Decorated(Base):
    """A decorator, zero-argument super(), a default, a private name."""

    __half = 0.5

    @doubled
    def forward(self, hidden, *, scale=3.0):
        hidden = super().forward(hidden, scale) * self.__half + hidden
        return self.norm(hidden)


def local_layer(shift):
    class Local(Layer):
        def forward(self, hidden):
            return self.norm(self.mix(hidden) + hidden) + shift

    return Local


@pytest.mark.parametrize("kind", [Decorated, local_layer(1.5)], ids=["decorated", "closure"])
def test_decorators_and_closures(kind, sums):
    model = build(kind).eval()
    x = torch.randn(2, N)
    expected = model(x)
    patch(model)
    close([model(x)], [expected])
    assert sums.call_count == 1
    assert type(model[0]).forward.__globals__ is globals()


def hidden_wrapper(function):
    def wrapper(self, hidden):
        return wrapper.call(self, hidden)

    wrapper.call = wrapper.__wrapped__ = function
    return wrapper


def test_a_decorator_that_cannot_be_carried_over():
    class Odd(Layer):
        @hidden_wrapper
        def forward(self, hidden):
            return self.norm(self.mix(hidden) + hidden)

    model = build(Odd)
    (site,) = residual_sites(patch(model).skipped)
    assert "decorator" in site.reason
    assert type(model[0]) is Odd


def test_source_that_is_not_what_runs():
    namespace = {"Layer": Layer, "__name__": __name__}
    exec(
        "class Made(Layer):\n    def forward(self, x):\n        return self.norm(x + x)", namespace
    )
    model = build(namespace["Made"])
    (site,) = residual_sites(patch(model).skipped)
    assert "source" in site.reason


MADE = """
from patching.lines.residual_cases import Layer

class Made(Layer):
    def forward(self, hidden):
        return self.norm(hidden - self.mix(hidden))
"""


def test_a_file_that_was_edited_after_its_import(tmp_path):
    """Its forward has the same names, so only the instructions differ from what runs."""
    file = tmp_path / "made.py"
    file.write_text(MADE)
    spec = importlib.util.spec_from_file_location("made", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file.write_text(MADE.replace("hidden - ", "hidden + "))
    os.utime(file, ns=(0, 0))  # the old time may be too near to tell them apart
    model = build(module.Made)
    x = torch.randn(2, N)
    expected = model(x)
    (site,) = residual_sites(patch(model).skipped)
    assert site.reason == "the source of its forward differs from the code that runs"
    close([model(x)], [expected])


class Counting(Layer):
    """Wraps each subclass's forward, as transformers' GradientCheckpointingLayer does."""

    calls = 0

    def __init_subclass__(cls, **_):
        if "forward" in vars(cls):
            cls.forward = counted(cls.forward)


def counted(function):
    @functools.wraps(function)
    def wrapper(self, hidden):
        Counting.calls += 1
        return function(self, hidden)

    return wrapper


class Counted(Counting):
    def forward(self, hidden):
        return self.norm(self.mix(hidden) + hidden)


def test_a_wrapper_that_every_subclass_gets_runs_once(sums):
    model = build(Counted).eval()
    x = torch.randn(2, N)
    expected = model(x)
    patch(model)
    before = Counting.calls
    close([model(x)], [expected])
    assert (sums.call_count, Counting.calls - before) == (1, 1)
