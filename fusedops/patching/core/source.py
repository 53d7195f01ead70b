"""Parses a method's source into a syntax tree, and builds a method from a changed tree.

The new method keeps the original's file name and line numbers, so that tracebacks and debuggers
show the model's source. It uses the original's live globals, and its closure holds the original's
cells, including `__class__` for `super()`.
"""

import __future__

import ast
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from fusedops.patching.core.probing import closure_values
from fusedops.patching.core.swap import new_class

__all__ = ["Unreadable", "innermost", "parse", "rebuild", "syntax_tree", "wrappers_of"]

FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class Unreadable(Exception):
    """Why a method cannot be rewritten."""


# CPython 3.11 counts how deep it is in a tree for all threads together: two that parse at the same
# time can fail with a SystemError.
_parsing = threading.Lock()


def syntax_tree(text: str) -> ast.Module:
    """`ast.parse`, by one thread at a time."""
    with _parsing:
        return ast.parse(text)


def innermost(cls: type[nn.Module]) -> types.FunctionType:
    """The class's forward without its decorators."""
    function = inspect.unwrap(cls.forward)
    if not isinstance(function, types.FunctionType):
        raise Unreadable("its forward is not a Python function")
    return function


def parse(function: types.FunctionType) -> ast.FunctionDef:
    """The function's tree. Raises Unreadable if its source differs from the code that runs."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise Unreadable("the source of its forward cannot be read") from None
    # The class line makes the indentation valid, and `self.__name` is mangled as in the class. An
    # empty line stands for it before a module's function.
    indented = lines[0][:1].isspace()
    text = f"class {_home(function)}:\n{''.join(lines)}" if indented else "\n" + "".join(lines)
    try:
        module = syntax_tree(text)
    except (SyntaxError, IndentationError):
        raise Unreadable("the source of its forward cannot be parsed") from None
    home: Any = module.body[0] if indented else module
    tree = home.body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise Unreadable("its forward is not defined with def")
    ast.increment_lineno(tree, first - 2)
    same_names = _names(_compile(tree, function)) == _names(function.__code__)
    if not same_names or not _is_compiled_from_its_file(function):
        raise Unreadable("the source of its forward differs from the code that runs")
    return tree


def rebuild(
    tree: ast.FunctionDef,
    old: types.FunctionType,
    more: Mapping[str, object],
    wrappers: Iterable[Any] = (),
) -> Callable:
    """`tree` in place of a function: same globals, closure and defaults.

    more: values that the closure holds in addition to the original's cells. wrappers: those of the
    original's decorators.
    """
    code = _compile(tree, old, more)
    cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in more.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    new: Any = types.FunctionType(code, old.__globals__, old.__name__, old.__defaults__, closure)
    new.__kwdefaults__ = old.__kwdefaults__
    functools.update_wrapper(new, old)
    del new.__wrapped__  # it wraps no other function
    for wrapper in wrappers:
        new = _rewrap(wrapper, new)
    return new


def _compile(
    tree: ast.FunctionDef, like: types.FunctionType, more: Iterable[str] = ()
) -> types.CodeType:
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(tree)), "decorator_list": []})
    home = ast.ClassDef(_home(like), [], [], [ast.copy_location(bare, tree)], [])
    # An enclosing function makes the original closure's names free variables.
    free = ", ".join({*like.__code__.co_freevars, *more} - {"__class__"})
    outer: Any = syntax_tree(f"def _({free}): pass")
    outer.body[0].body = [home]
    flags = like.__code__.co_flags & FUTURE
    ast.fix_missing_locations(outer)
    module = compile(outer, like.__code__.co_filename, "exec", flags, dont_inherit=True)
    return next(code for code in _nested(module) if code.co_name == tree.name)


def _is_compiled_from_its_file(function: types.FunctionType) -> bool:
    """Whether the current file as a whole compiles to the code that runs."""
    code = function.__code__
    text = "".join(inspect.findsource(function)[0])
    same = [c for c in _file(text, code.co_flags & FUTURE) if c.co_name == code.co_name]
    at_line = (c for c in same if c.co_firstlineno == code.co_firstlineno)
    return any(_instructions(c) == _instructions(code) for c in at_line)


@functools.lru_cache(maxsize=4)
def _file(text: str, flags: int) -> list[types.CodeType]:
    try:
        return list(_nested(compile(text, "", "exec", flags, dont_inherit=True)))
    except (SyntaxError, ValueError):
        return []


def _instructions(code: types.CodeType) -> tuple:
    constants = [
        _instructions(c) if isinstance(c, types.CodeType) else (type(c), repr(c))
        for c in code.co_consts
    ]
    cells = code.co_freevars, code.co_cellvars
    return code.co_code, code.co_names, code.co_varnames, cells, constants


def _names(code: types.CodeType) -> tuple:
    """The parts that two compilations share; the instructions vary with the file's imports."""
    plain = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
    return code.co_names, code.co_varnames, code.co_freevars, plain


def _home(method: types.FunctionType) -> str:
    """The name of the class that defines the method."""
    return ["_", *method.__qualname__.split(".")][-2]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _nested(constant)


def wrappers_of(cls: type[nn.Module]) -> list[Any]:
    """The wrappers of a forward's decorators, innermost first, without those of all subclasses."""
    given = _given_wrapper(cls)
    wrappers: list[Any] = []
    function: Any = cls.forward
    while hasattr(function, "__wrapped__"):
        if getattr(function, "__code__", None) is not given:
            wrappers.append(function)
        function = function.__wrapped__
    return wrappers[::-1]


def _given_wrapper(cls: type[nn.Module]) -> types.CodeType | None:
    """The code that `__init_subclass__` wraps around a forward, if it does."""

    def forward(self): ...

    subclass: Any = new_class(cls, {"__module__": cls.__module__, "forward": forward})
    return None if subclass.forward is forward else subclass.forward.__code__


def _rewrap(wrapper: Any, inner: Callable) -> Callable:
    """A copy of the wrapper whose cell holds `inner` instead of the wrapped function."""
    values = closure_values(wrapper) if isinstance(wrapper, types.FunctionType) else {}
    held = [i for i, value in enumerate(values.values()) if value is wrapper.__wrapped__]
    if len(held) != 1:
        raise Unreadable("its forward has a decorator that cannot be reapplied")
    cells = list(wrapper.__closure__)
    cells[held[0]] = types.CellType(inner)
    rewrapped: Any = types.FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells)
    )
    rewrapped.__kwdefaults__ = wrapper.__kwdefaults__
    functools.update_wrapper(rewrapped, wrapper)
    rewrapped.__wrapped__ = inner
    return rewrapped
