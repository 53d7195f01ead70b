"""Shared helpers for fuzz tests: tensors of any layout, checks of results and errors.

`HYPOTHESIS_PROFILE=fuzz` (make fuzz) draws many new examples; without it a few, the same each run.
"""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fusedops
from fusedops.references.adamw import stochastic
from fusedops.testing import device_of, gradients, placed, poisoned, yardstick

_common = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": set(Phase) - {Phase.explain},
}
settings.register_profile("short", max_examples=50, derandomize=True, database=None, **_common)
settings.register_profile("fuzz", max_examples=400, print_blob=True, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NOT_FLOATS = [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]

Fill = Callable[[tuple[int, ...]], Tensor]

# A view of the given shape of what `fill` makes: a contiguous tensor of the shape that it is asked.
LAYOUTS: dict[str, Callable[[Fill, tuple[int, ...]], Tensor]] = {
    "contiguous": lambda fill, shape: fill(shape),
    "misaligned": lambda fill, shape: fill((math.prod(shape) + 1,))[1:].view(shape),
    "transposed": lambda fill, shape: fill(shape[::-1]).permute(*reversed(range(len(shape)))),
    "batch last": lambda fill, shape: fill((*shape[1:], shape[0])).movedim(-1, 0),
    "rows transposed": lambda fill, shape: fill((*shape[-2::-1], shape[-1])).permute(
        *reversed(range(len(shape) - 1)), -1
    ),
    "slice of rows": lambda fill, shape: fill((*shape[:-1], shape[-1] + 5))[..., 3:-2],
    "start of rows": lambda fill, shape: fill((*shape[:-1], shape[-1] + 3))[..., :-3],
    "every second column": lambda fill, shape: fill((*shape[:-1], 2 * shape[-1]))[..., ::2],
    "every second row": lambda fill, shape: fill((2 * shape[0], *shape[1:]))[::2],
    "one row expanded": lambda fill, shape: fill((1, *shape[1:])).expand(shape),
    "one column expanded": lambda fill, shape: fill((*shape[:-1], 1)).expand(shape),
    "one element expanded": lambda fill, shape: fill(()).expand(shape),
    "overlapping": lambda fill, shape: fill((sum(shape),)).as_strided(shape, [1] * len(shape)),
}

# What is made of an output: its gradient then comes in with such strides.
RECEIVED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda o: o,
    "transposed": lambda o: o.movedim(-1, 0),
    "slice of rows": lambda o: torch.cat([o, o.new_zeros((*o.shape[:-1], 5))], -1),
    "one row expanded": lambda o: o.sum(0, keepdim=True),
}

# Of a standard normal draw.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda t: t * 3 + 0.5,
    "far from zero": lambda t: t + 1000,
    "zeros": torch.zeros_like,
    "constant": lambda t: torch.full_like(t, 0.1),
    "large constant": lambda t: torch.full_like(t, 7.7e8),
    "small": lambda t: t * 1e-6,
    "tiny": lambda t: t * 1e-30,
    "denormal": lambda t: t * 1e-40,
    "large": lambda t: t * 1e4,
    "huge": lambda t: t * 1e30,
    "one NaN": lambda t: _one(t, torch.nan),
    "one inf": lambda t: _one(t, torch.inf),
    "one -inf": lambda t: _one(t, -torch.inf),
}

# The bfloat16 instructions of AVX-512 take these for zeros.
FLUSHED = ("denormal", torch.bfloat16)

# Around a vector, a step and a warp; one dimension past what a block or a tile holds.
SIZES = [0, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 130, 257, 1000, 1023, 1024, 1031, 4099, 20011]


def _one(t: Tensor, value: float) -> Tensor:
    """t with `value` in its middle."""
    t.flatten()[t.numel() // 2 : t.numel() // 2 + 1] = value
    return t


@dataclass(frozen=True)
class Drawn:
    """A tensor to make. Its repr is all that a regression needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    values: str = "normal"
    seed: int = 0

    def tensor(self) -> Tensor:
        """The same bits each time."""
        draw = torch.Generator().manual_seed(self.seed)

        def fill(shape):
            return VALUES[self.values](torch.randn(shape, generator=draw)).to(self.dtype)

        return LAYOUTS[self.layout if self.shape else "contiguous"](fill, self.shape)


@dataclass(frozen=True)
class Call:
    """A call to make: `op(**arguments)` with each `Drawn` made, and the gradients of `grads`."""

    op: str
    arguments: dict[str, Any]
    grads: frozenset[str] = frozenset()
    received: str = "contiguous"
    device: torch.device = field(default=torch.device("cpu"), repr=False)

    def on(self, backend: str) -> "Call":
        """The same call where the backend runs."""
        return replace(self, device=device_of(backend))

    def in_float64(self) -> dict[str, Any]:
        """The arguments, those that are floating in float64."""

        def wide(v: Any) -> Any:
            return v.double() if isinstance(v, Tensor) and v.is_floating_point() else v

        return {name: wide(v) for name, v in self.made().items()}

    def accumulator(self) -> torch.dtype:
        """The dtype of sums: float32, or float64 where a tensor has it."""
        dtypes = (v.dtype for v in self.arguments.values() if isinstance(v, Drawn))
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def made(self) -> dict[str, Any]:
        drawn = {name: v for name, v in self.arguments.items() if isinstance(v, Drawn)}
        tensors = placed(tuple(v.tensor() for v in drawn.values()), self.device)
        return self.arguments | dict(zip(drawn, tensors, strict=True))


@st.composite
def shapes(draw: st.DrawFn, most: int = 32768) -> tuple[int, ...]:
    """0 to 4 dimensions of 0, 1, primes and powers of two: no more than `most` elements."""
    shape: list[int] = []
    for _ in range(draw(st.sampled_from([2, 1, 3, 4, 0]))):
        size = draw(st.integers(1, 9) | st.sampled_from(SIZES))
        shape.insert(0, min(size, most))
        most //= max(shape[0], 1)
    return tuple(shape)


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> st.SearchStrategy[Drawn]:
    """A tensor of any layout and values. The seed is drawn too: what fails depends on it."""
    return st.builds(
        Drawn,
        st.just(shape),
        st.just(dtype),
        st.sampled_from(list(LAYOUTS)),
        st.sampled_from(["normal"] * 8 + [v for v in VALUES if (v, dtype) != FLUSHED]),
        st.integers(0, 2**16),
    )


@st.composite
def with_gradients(
    draw: st.DrawFn, op: str, arguments: dict[str, Any], received: tuple[str, ...] = (*RECEIVED,)
) -> Call:
    """A call that wants some of its tensors' gradients."""
    tensors = sorted(k for k, v in arguments.items() if isinstance(v, Drawn))
    grads = frozenset(draw(st.lists(st.sampled_from(tensors))))
    return Call(op, arguments, grads, draw(st.sampled_from(received)))


@st.composite
def broken(
    draw: st.DrawFn, calls: st.SearchStrategy[Call], wrong_values: Callable, *fixed: str
) -> Call:
    """A call with one argument that is wrong, or that at least is not what is documented.

    wrong_values: those of an argument, by its name and all arguments. fixed: names that stay right.
    """
    call = draw(calls)
    name = draw(st.sampled_from(sorted(call.arguments.keys() - {*fixed})))
    wrong = draw(st.sampled_from(wrong_values(name, call.arguments)))
    return Call(call.op, call.arguments | {name: wrong})


def wrong_tensors(like: Drawn, dtypes: Sequence[torch.dtype] = tuple(NOT_FLOATS)) -> list[Any]:
    """Of other shapes and dtypes than one has."""
    shape = like.shape
    others = [(), (1,), (*shape, 1), (1, *shape), shape[:-1], tuple(s + 1 for s in shape)]
    wrong: list[Any] = [Drawn(s, like.dtype) for s in others if s != shape]
    return wrong + [Drawn(shape, dtype) for dtype in dtypes if dtype != like.dtype]


def results(function: Callable, call: Call, arguments: dict[str, Any] | None = None):
    """The outputs and the gradients that are wanted, by the names that `gradients` gives them.

    arguments: other arguments than the call's own. Where gradients are received through a sum of
    rows, it is not an output: the roundings of its terms stay where these cancel.
    """
    arguments, names = arguments or call.made(), sorted(call.grads)

    def run(*leaves, receive=RECEIVED[call.received]):
        outputs = function(**arguments | dict(zip(names, leaves, strict=True)))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(map(receive, outputs))

    if names:
        values = gradients(run, tuple(arguments[name] for name in names))
        summed = call.received == "one row expanded"
        return {k: v for k, v in values.items() if "gradient" in k or not summed}
    torch.manual_seed(0)
    return {f"output {i}": o for i, o in enumerate(run(receive=RECEIVED["contiguous"]))}


def evaluated(call: Call, ours: dict | Exception, reference: Callable, eager: Any = None) -> tuple:
    """The float64 arguments, and eager's and the exact results. Raises `ours` if it is an error.

    eager: the reference in the arguments' dtype, if nothing else is given.
    """
    if isinstance(ours, Exception):
        raise ours
    exactly = call.in_float64()
    return exactly, results(eager or reference, call), results(reference, call, exactly)


def redrawn(call: Call, reference: Callable, exactly: dict[str, Any], key: str) -> Iterator[Tensor]:
    """A result with its roundings drawn again."""
    for seed in range(4):
        with Rounded(call.accumulator(), seed):
            yield results(reference, call, exactly)[key]


def attempt(function, call: Call) -> dict[str, Tensor] | Exception:
    """A call's result, or its error for a user's mistake."""
    try:
        return results(function, call)
    except (TypeError, ValueError, RuntimeError) as error:
        return error


def ours(call: Call, backend: str) -> dict[str, Tensor] | Exception:
    """Our function's result on a backend, or its error."""
    function = getattr(fusedops.functional, call.op)
    with fusedops.backend(backend), poisoned():
        return attempt(function, call)


def says_what_is_wrong(call: Call, message: str) -> bool:
    names = inspect.signature(getattr(fusedops.functional, call.op)).parameters
    return bool(re.search(rf"\b{call.op}\b", message)) and any(
        re.search(rf"\b{name}\b", message) for name in names
    )


class Rounded(TorchDispatchMode):
    """Monte Carlo arithmetic (Parker, 1997): float64 results move as `dtype` rounds, up or down.

    Each moves by half an ulp, and by the smallest denormal, of `dtype`. What that does to the
    result of a formula is what evaluating it in `dtype` may do. The terms of a sum move as well: a
    sum in any order is the exact sum of terms that are each a few roundings off (Higham, 1993).
    """

    SUMS = (torch.ops.aten.sum, torch.ops.aten.mean, torch.ops.aten.var_mean)

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.dtype, self.draw = torch.finfo(dtype), torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.SUMS:
            args = tree_map_only(Tensor, self._moved, args)
        out = func(*args, **(kwargs or {}))
        aliases = func.is_view or func._schema.is_mutable
        return out if aliases else tree_map_only(Tensor, self._moved, out)

    def _moved(self, t: Tensor) -> Tensor:
        if t.dtype != torch.float64:
            return t
        sign = torch.randint(2, t.shape, generator=self.draw).to(t.device) * 2 - 1
        smallest = self.dtype.tiny * self.dtype.eps * (t != 0)
        step = t.abs() * self.dtype.eps / 2 + smallest
        return t + sign * step.masked_fill(~t.isfinite(), 0)


class Redrawn(TorchDispatchMode):
    """Rounds 16-bit results again: from float32, up or down at random.

    Where a formula rounds what is between its terms, the result depends on the luck of these.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        narrow = isinstance(out, Tensor) and out.dtype in (torch.float16, torch.bfloat16)
        if not narrow or func.is_view or func._schema.is_mutable:
            return out
        if func.overloadpacket == torch.ops.aten._to_copy:
            wide = args[0]
        else:
            args, kwargs = tree_map_only(torch.dtype, lambda _: torch.float32, (args, kwargs))
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
            wide = func(*args, **kwargs)
        random = torch.randint(2**16, out.shape, generator=self.draw, dtype=torch.int32)
        return stochastic(wide.float(), random, out.dtype).as_subclass(type(out))


def _widened(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def judge(
    kernel: Tensor, eager: Tensor, exact: Tensor, rounded: Callable[[], Iterator[Tensor]]
) -> str | None:
    """The fault of `kernel`, as text; None if `yardstick` accepts it.

    Over few elements eager's error is luck: in one draw of many all roundings may cancel. So the
    yardstick measures against the largest error, element by element, of eager and of `rounded`,
    evaluations of the formula with the roundings drawn anew. Where one of these is infinite or NaN
    and the exact result is not, or the reverse, or where such an error decides whether the dtype
    holds the result, the input is past what the dtype can tell, and nothing is asked. A bfloat16
    below the normal numbers counts as 0, which AVX-512's conversion makes of it.
    """
    least = torch.finfo(torch.bfloat16).tiny if kernel.dtype == torch.bfloat16 else 0
    kernel, eager, exact = (_flushed(t, least) for t in (kernel, eager, exact))
    complaint = yardstick(kernel, eager, exact)
    if complaint is None:
        return None
    others = [eager.double(), *(_flushed(t, least) for t in rounded())]
    worst = torch.stack([(t - exact).abs() for t in others]).amax(0)
    same = torch.stack([(t == exact) | (t.isnan() & exact.isnan()) for t in others]).all(0)
    doubtful = ~worst.isfinite() & ~same
    most, size = torch.finfo(kernel.dtype).max, exact.abs()
    doubtful |= worst.isfinite() & (size + worst > most) & (size - worst <= most)
    eager = torch.where(worst.isfinite(), exact + worst, exact)
    return yardstick(*(t.masked_fill(doubtful, 0) for t in (kernel, eager, exact)))


def _flushed(t: Tensor, least: float) -> Tensor:
    return t.masked_fill(t.abs() < least, 0)


def assert_as_good(
    actual: dict[str, Tensor],
    eager: dict[str, Tensor],
    exact: dict[str, Tensor],
    rounded: Callable[[str], Iterator[Tensor]],
    contiguous: bool = False,
) -> None:
    """Assert that `judge` passes every result. contiguous: the outputs are so, whatever went in."""
    assert actual.keys() == eager.keys()
    for key, value in actual.items():
        assert value.dtype == eager[key].dtype and value.shape == eager[key].shape
        assert value.is_contiguous() or "output" not in key or not contiguous
        complaint = judge(value, eager[key], exact[key], partial(rounded, key))
        assert complaint is None, f"{key}: {complaint}"


Result = dict[str, Tensor] | Exception


def says_it(call: Call, error: Exception) -> None:
    """Asserts that an error names the function and one of its arguments."""
    assert says_what_is_wrong(call, str(error)), error


def right_or_refused(
    compare: Callable[[Call, Result, str], None],
    refused: Callable[[Call, Exception], None] = says_it,
) -> Callable[[Call, Result, str], None]:
    """A judge of calls that may be wrong: what has a result must have the right one."""

    def judge(call: Call, result: Result, backend: str) -> None:
        if isinstance(result, Exception):
            refused(call, result)
        else:
            compare(call, result, backend)

    return judge


@dataclass(frozen=True)
class Fuzz:
    """How tests/contract/test_fuzz.py calls a family's operators.

    calls: draws a call of an operator that its docstring allows. backends: for each operator.
    compare: asserts that a result on a backend is as good as the reference's. run: returns a call's
    result or error on a backend. mistakes: draws a call of an operator that may be wrong; judge
    asserts that its result is right, or its error clear. examples: calls that failed once, and
    calls that are drawn too rarely. interpreted: for an operator, calls that are small enough for
    Triton's interpreter.
    """

    calls: Callable[[str], st.SearchStrategy[Call]]
    backends: dict[str, list[str]]
    compare: Callable[[Call, Result, str], None]
    run: Callable[[Call, str], Result] = ours
    mistakes: Callable[[str], st.SearchStrategy[Call]] | None = None
    judge: Callable[[Call, Result, str], None] | None = None
    examples: dict[str, Call] = field(default_factory=dict)
    example_backends: Sequence[str] = ()
    interpreted: dict[str, st.SearchStrategy[Call]] = field(default_factory=dict)
