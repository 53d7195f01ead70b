"""Ways to call a function or module in memory-growth tests, for example under autocast."""

import contextlib
import copy
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from calling import Calls
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from growth.measure import Watch
from growth.subject import BF16, Subject, Turns, total

Call = Callable[[], None]
Way = Callable[[Subject, Watch], Call]


class Interruption(Exception):
    """Raised in the middle of a call, to interrupt it."""


def interrupt(*_: Any) -> None:
    raise Interruption


def fresh(subject: Subject, watch: Watch) -> list[Tensor]:
    inputs = subject.inputs()
    watch(*inputs)
    return inputs


def forward(subject: Subject, watch: Watch, run: Callable | None = None) -> Tensor:
    """Returns one call's loss. All of its tensors are watched."""
    outputs = (subject.run if run is None else run)(*fresh(subject, watch))
    watch(*tree_leaves(outputs))
    return total(outputs)


def step(subject: Subject, watch: Watch, run: Callable | None = None) -> None:
    loss = forward(subject, watch, run)
    loss.backward()
    watch(loss, *(p.grad for p in subject.parameters()))
    subject.forget_gradients()


def training(subject: Subject, watch: Watch) -> Call:
    return lambda: step(subject, watch)


@torch.no_grad()
def _forward(subject: Subject, watch: Watch) -> None:
    forward(subject, watch)


def without_gradients(subject: Subject, watch: Watch) -> Call:
    return lambda: _forward(subject, watch)


def double_backward(subject: Subject, watch: Watch) -> Call:
    def call():
        inputs = fresh(subject, watch)
        leaves = [t for t in [*inputs, *subject.parameters()] if t.requires_grad]
        loss = total(subject.run(*inputs))
        grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        total(grads).backward()
        watch(*grads, *(leaf.grad for leaf in leaves))
        subject.forget_gradients()

    return call


def checkpointed(use_reentrant: bool, subject: Subject, watch: Watch) -> Call:
    def run(*inputs):
        outputs = subject.run(*inputs)
        watch(*tree_leaves(outputs))  # those of the recomputation too
        return total(outputs)

    return lambda: step(
        subject, watch, lambda *inputs: checkpoint(run, *inputs, use_reentrant=use_reentrant)
    )


def modules_of(subject: Subject) -> list[nn.Module]:
    """Returns the subject's modules. A function becomes a module."""
    if subject.module is None:
        return [Calls(subject.run)]
    return list(subject.module.modules())


def _root(subject: Subject, modules: list[nn.Module]) -> Callable:
    return modules[0] if subject.module is None else subject.run


@contextlib.contextmanager
def removed(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def backward_hooks(subject: Subject, watch: Watch) -> Call:
    modules = modules_of(subject)
    run, turns = _root(subject, modules), Turns(modules)

    def call():
        module, inputs = turns(), fresh(subject, watch)
        handles = [
            module.register_full_backward_pre_hook(lambda *given: watch(*tree_leaves(given[1:]))),
            module.register_full_backward_hook(lambda *given: watch(*tree_leaves(given[1:]))),
            *(t.register_hook(watch) for t in inputs if t.requires_grad),
        ]
        with removed(*handles):
            outputs = run(*inputs)
            for t in tree_leaves(outputs):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.retain_grad()
                    t.register_hook(watch)
            watch(*tree_leaves(outputs))
            total(outputs).backward()
        subject.forget_gradients()

    return call


def saved_tensor_hooks(subject: Subject, watch: Watch) -> Call:
    def pack(t):
        t = t.detach()  # an output that is its own saved tensor would be a cycle
        watch(t)
        return t

    def call():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            step(subject, watch)

    return call


def exception_in_forward(subject: Subject, watch: Watch) -> Call:
    """Raises after one of the subject's modules, by turns, or after the function."""
    modules = modules_of(subject)
    run, turns = _root(subject, modules), Turns(modules)

    def call():
        handle = turns().register_forward_hook(interrupt)
        with removed(handle), contextlib.suppress(Interruption):
            step(subject, watch, run)
        subject.forget_gradients()

    return call


# torch.nn.MultiheadAttention asserts.
WRONG = RuntimeError, ValueError, IndexError, TypeError, AssertionError


def broken(inputs: list[Tensor]) -> Iterator[list[Tensor]]:
    """Returns variants of the inputs, each with one wrong shape, dtype or value."""
    for i, t in enumerate(inputs):
        longer = t.detach().new_ones(*t.shape[:-1], t.shape[-1] + 1) if t.dim() else t[None, None]
        replaced = [longer, t.detach()[None, None], t.detach().to(torch.complex64)]
        if not t.is_floating_point():
            replaced.append(torch.full_like(t, 100))
        for wrong in replaced:
            yield [*inputs[:i], wrong, *inputs[i + 1 :]]


def exception_in_operator(subject: Subject, watch: Watch) -> Call:
    def refused(which: int) -> bool:
        inputs = next(itertools.islice(broken(fresh(subject, watch)), which, None))
        try:
            subject.run(*inputs)
        except WRONG:
            return True
        return False

    possible = range(sum(1 for _ in broken(subject.inputs())))
    wrong = [which for which in possible if refused(which)]
    assert wrong, "no wrong input was refused"
    turns = Turns(wrong)

    def call():
        if not refused(turns()):
            raise RuntimeError("what was refused before was not")

    return call


def exception_in_backward(subject: Subject, watch: Watch) -> Call:
    """Raises before the operator's backward and after it, by turns."""
    turns = Turns([True, False])

    def call():
        inputs = fresh(subject, watch)
        outputs = [t for t in tree_leaves(subject.run(*inputs)) if isinstance(t, Tensor)]
        watch(*outputs)
        leaves = [t for t in [*inputs, *subject.parameters()] if t.requires_grad]
        first = next(t for t in outputs if t.requires_grad) if turns() else leaves[0]
        handle = first.register_hook(interrupt)
        with removed(handle), contextlib.suppress(Interruption):
            total(outputs).backward()
            raise AssertionError("the hook was not called")
        subject.forget_gradients()

    return call


def anomaly_mode(subject: Subject, watch: Watch) -> Call:
    def call():
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            step(subject, watch)

    return call


def autocast(subject: Subject, watch: Watch) -> Call:
    def run(*inputs):
        with torch.autocast("cpu", BF16):
            return subject.run(*inputs)

    return lambda: step(subject, watch, run)


def compiled(subject: Subject, watch: Watch) -> Call:
    torch.compiler.reset()
    run = torch.compile(subject.run, dynamic=False)
    return lambda: step(subject, watch, run)


def function_transforms(subject: Subject, watch: Watch) -> Call:
    """Alternates grad, jvp and vmap over the tensors that have gradients."""

    def transformed(transform, inputs):
        floats = [i for i, t in enumerate(inputs) if t.requires_grad]
        given = [t.detach() for t in inputs]

        def loss(*values):
            full = dict(enumerate(given)) | dict(zip(floats, values, strict=True))
            return total(subject.run(*full.values()))

        return transform(loss, tuple(given[i] for i in floats))

    def grad(loss, values):
        return torch.func.grad(loss, tuple(range(len(values))))(*values)

    def jvp(loss, values):
        return torch.func.jvp(loss, values, values)

    def vmap(loss, values):
        batches = [torch.stack([t, t]) for t in values]
        return torch.func.vmap(loss, randomness="different")(*batches)

    turns = Turns([grad, jvp, vmap])

    def call():
        watch(*tree_leaves(transformed(turns(), fresh(subject, watch))))

    return call


def copies(subject: Subject, watch: Watch) -> Call:
    """Trains a deep copy and a pickle of the module, and drops them."""

    def pickled(module):
        file = io.BytesIO()  # pickle alone does not take float8 tensors
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def call():
        copied = copy.deepcopy(subject.module)
        for again in (copied, pickled(copied)):
            watch(*again.parameters(), *again.buffers())
            total(subject.bind(again)(*fresh(subject, watch))).backward()

    return call


class _SecondThread:
    """Runs functions in a thread, which ends and frees all its memory after `calls` of them."""

    def __init__(self, calls: int) -> None:
        self._calls, self._left = calls, 0
        self._pool: ThreadPoolExecutor

    def __call__(self, function: Callable, *args: Any) -> Any:
        if self._left == 0:
            self._pool, self._left = ThreadPoolExecutor(1), self._calls
        result = self._pool.submit(function, *args).result()
        self._left -= 1
        if self._left == 0:
            self._end()
        return result

    def _end(self) -> None:
        task = Path("/proc/self/task", str(self._pool.submit(threading.get_native_id).result()))
        self._pool.shutdown()
        while task.exists():  # Python joins a thread before its C++ destructors have run
            time.sleep(0)


def second_thread(subject: Subject, watch: Watch) -> Call:
    """Runs the calls in new threads, 25 calls each.

    Every second backward runs in this thread instead. MKL never forgets a thread that has
    multiplied: with a thread per call its table would double and exceed the limit during the
    measurement.
    """
    turns, thread = Turns([step, forward]), _SecondThread(25)

    def call():
        loss = thread(turns(), subject, watch)
        if loss is not None:
            loss.backward()
        subject.forget_gradients()

    return call


def _strided(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t


def _misaligned(t: Tensor) -> Tensor:
    buffer = t.new_empty(t.numel() + 1)[1:]
    return buffer.view(t.shape).copy_(t)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() else t


def layouts_and_dtypes(subject: Subject, watch: Watch) -> Call:
    """Changes the floating inputs. A module's inputs keep the dtype of its parameters."""
    floats = torch.float32, torch.float16, torch.bfloat16, torch.float64
    dtypes = floats if subject.module is None else floats[:1]
    turns = Turns(itertools.product([_strided, _misaligned, _transposed], dtypes))

    def call():
        layout, dtype = turns()

        def run(*inputs):
            given = inputs[: subject.flexible]
            changed = [layout(t.to(dtype)) if t.is_floating_point() else t for t in given]
            return subject.run(*changed, *inputs[len(given) :])

        step(subject, watch, run)

    return call


WAYS: dict[str, Way] = {
    "training": training,
    "no_grad": without_gradients,
    "exception in forward": exception_in_forward,
    "double backward": double_backward,
    "reentrant checkpoint": partial(checkpointed, True),
    "checkpoint without reentry": partial(checkpointed, False),
    "backward hooks": backward_hooks,
    "saved-tensor hooks": saved_tensor_hooks,
    "exception in operator": exception_in_operator,
    "exception in backward": exception_in_backward,
    "anomaly mode": anomaly_mode,
    "autocast": autocast,
    "compiled": compiled,
    "torch.func": function_transforms,
    "copies": copies,
    "second thread": second_thread,
    "layouts and dtypes": layouts_and_dtypes,
}
