"""`warm` prepares a model for CUDA graphs; `graph_step` captures a step as one.

A capture records launches; it can neither compile a kernel nor load one. A replay reads and writes
the addresses that the capture saw.
"""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_unflatten
from torch.utils.weak import TensorWeakRef

from fusedops.measuring.snapshot import Snapshot
from fusedops.patching.yardstick import Batch, call, fresh, objective

__all__ = ["graph_step", "warm"]

Step = TypeVar("Step", bound=Callable[..., Any])
WARMUPS = 3  # runs of a step before its capture
_expired = torch.UntypedStorage._expired  # of a storage's address; one call in C for each


def warm(model: nn.Module, *batches: Batch) -> list[str]:
    """Compiles and loads every Triton kernel that a CUDA graph of `model` will need.

    During a capture a kernel that is missing raises RuntimeError with the advice to call `warm`.
    Which kernels a call needs depends on its shapes, dtypes and strides, so pass a batch of each
    shape that will be captured: of each batch size, and of a prompt as well as of one token.

    batches: each a dict of keyword arguments, a tuple or list of positional ones, or one tensor, on
    the model's GPU. The model runs once for each, in its current mode; the backward runs too if
    gradients are recorded and a parameter requires one. Buffers, modes and random generators are
    afterwards as before; parameters and their gradients are not touched. Returns the names of the
    kernels that were compiled or loaded. If the model is on no GPU, it returns [] and runs nothing.
    Raises what the model raises.
    """
    if not any(t.is_cuda for t in (*model.parameters(), *model.buffers())):
        return []
    compiled: list[str] = []
    if find_spec("triton"):
        from fusedops.triton.tile import compiled
    before = len(compiled)
    for batch in batches:
        run(model, batch)
    return compiled[before:]


def run(model: nn.Module, batch: Batch) -> None:
    """Runs the forward and, if gradients are recorded, the backward; then restores the state."""
    kept = Snapshot(model, None, parameters=False)
    try:
        output = call(model, fresh(batch))
        needed = [p for p in model.parameters() if p.requires_grad]
        if needed and torch.is_grad_enabled():
            loss = objective(output)
            if loss.requires_grad:
                torch.autograd.grad(loss, needed, allow_unused=True)
    finally:
        kept.restore()


def graph_step(step: Step, *example: Any) -> Step:
    """Captures `step(*example)` as a CUDA graph; returns a function that replays it.

    The host then spends one launch on a step, whatever it contains. For steps whose shapes never
    change and which are limited by the host: small batches, generation, small models. `step` may
    run forward, backward and optimizer; it must not read a value from the GPU (no `.item()`), and
    its optimizer needs `capturable=True`.

    example: the step's arguments, in any nesting; tensors on one GPU. They are copied once. Each
    later call copies its tensors into those copies, so their shapes and dtypes must be the same;
    all other arguments must be equal to the example's. A call does not wait for its copies: write
    new data into a pinned tensor that was passed only after the step has run. It returns the
    tensors that the graph writes, which the next call overwrites.

    `step` first runs three times without a graph, which compiles kernels, makes the optimizer's
    state and changes parameters like any step. In one of these runs, all tensors are noted that the
    step reads and did not make itself. Each replay checks that their memory is still alive and that
    parameters have not moved: load a checkpoint or clear gradients in place, or capture again.

    Without a GPU it gives one warning and returns `step` itself. Raises ValueError if tensors of
    `example` are on several devices or a later call's arguments differ, and RuntimeError if the
    step cannot be captured or a tensor it reads was freed or moved.
    """
    devices = {t.device for t in tree_iter(example) if isinstance(t, Tensor)}
    if len(devices) > 1:
        raise ValueError(
            "graph_step: example's tensors must be on one device, got "
            + ", ".join(sorted(map(str, devices)))
        )
    on_gpu = all(device.type == "cuda" for device in devices)
    if not on_gpu or not torch.cuda.is_available():
        where = next(map(str, devices), "cpu")
        warnings.warn(
            f"graph_step: CUDA graphs need a GPU, and this step is on {where}: it runs as it is",
            stacklevel=2,
        )
        return step
    device = next(iter(devices), torch.device("cuda", torch.cuda.current_device()))
    replayed: Any = Replayed(step, example, Capture(device))
    return replayed


class Capture:
    """The CUDA calls of a `Replayed` step: runs, captures and replays it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph = torch.cuda.CUDAGraph()

    def warm(self, step: Callable[[], object]) -> None:
        """Runs the step on a side stream, as torch.cuda.graph's example does before a capture."""
        current, beside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            step()
        current.wait_stream(beside)

    def record(self, step: Callable[[], Any]) -> Any:
        with torch.cuda.device(self.device), torch.cuda.graph(self.graph):
            return step()

    def replay(self) -> None:
        self.graph.replay()


class Replayed:
    """A captured step. Calling it copies the arguments, checks the addresses and replays."""

    def __init__(self, step: Callable[..., Any], example: tuple, capture: Any) -> None:
        given, self.form = tree_flatten(example)
        self.inputs = [t.detach().clone() if isinstance(t, Tensor) else t for t in given]
        for t, original in zip(self.inputs, given, strict=True):
            if isinstance(t, Tensor):
                t.requires_grad_(original.requires_grad)
        args = tree_unflatten(self.inputs, self.form)
        self.reads = Reads()
        for i in range(WARMUPS):
            # Not in the last run: torch.compile does not compile under a dispatch mode.
            capture.warm(self._watched(step, args) if i == WARMUPS - 2 else lambda: step(*args))
        try:
            outputs = capture.record(lambda: step(*args))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "graph_step: the step cannot be captured: it may read a value from the GPU, as "
                f"`.item()` does, or its optimizer needs `capturable=True`: {error}"
            ) from error
        self.outputs = tree_map(_detached, outputs)
        self.reads.forget_freed()
        self.replay = capture.replay

    def _watched(self, step: Callable[..., Any], args: Any) -> Callable[[], object]:
        def run() -> object:
            with self.reads:
                return step(*args)

        return run

    def __call__(self, *args: Any) -> Any:
        given, form = tree_flatten(args)
        if form != self.form:
            raise ValueError(f"graph_step: arguments must be nested as {self.form}, got {form}")
        with torch.no_grad():
            for mine, new in zip(self.inputs, given, strict=True):
                _copy(mine, new)
        self.reads.check()
        self.replay()
        return self.outputs


def _detached(value: Any) -> Any:
    """A tensor without its autograd graph, whose memory the CUDA graph would keep."""
    return value.detach() if isinstance(value, Tensor) else value


def _copy(mine: Any, new: Any) -> None:
    if new is mine:
        return
    if isinstance(mine, Tensor) and isinstance(new, Tensor):
        if mine.shape != new.shape or mine.dtype != new.dtype:
            raise ValueError(
                f"graph_step: a tensor must be {_described(mine)} as in the example, "
                f"got {_described(new)}"
            )
        mine.copy_(new, non_blocking=True)
    elif isinstance(mine, Tensor) or isinstance(new, Tensor) or mine != new:
        raise ValueError(
            f"graph_step: an argument that is no tensor must be {mine!r} as in the example, "
            f"got {new!r}"
        )


def _described(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


class Reads(TorchDispatchMode):
    """Notes the memory that operators read and that none of them allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}  # by the storage's address, kept while noted
        self.read: dict[int, tuple[StorageWeakRef, str]] = {}  # with what it held
        self.parameters: dict[int, tuple[TensorWeakRef, int]] = {}  # with its address

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(not issubclass(t, nn.Parameter) and t is not Tensor for t in types):
            return NotImplemented  # a subclass unwraps itself first, such as DTensor
        for t in tree_iter((args, kwargs)):
            if isinstance(t, Tensor) and t.layout == torch.strided:
                self._note(t)
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor) and t.layout == torch.strided:
                held = StorageWeakRef(t.untyped_storage())
                if held.cdata not in self.read:
                    self.made[held.cdata] = held
        return out

    def _note(self, t: Tensor) -> None:
        held = StorageWeakRef(t.untyped_storage())
        if held.cdata in self.made:
            return
        self.read.setdefault(held.cdata, (held, _described(t)))
        if isinstance(t, nn.Parameter):
            self.parameters.setdefault(id(t), (TensorWeakRef(t), t.data_ptr()))

    def forget_freed(self) -> None:
        """Drops what the step frees in each run."""
        self.read = {at: noted for at, noted in self.read.items() if not noted[0].expired()}

    def check(self) -> None:
        """Raises RuntimeError if noted memory was freed or a parameter has moved."""
        gone = ""
        if any(map(_expired, self.read)):
            gone = next(what for held, what in self.read.values() if held.expired())
        for held, address in self.parameters.values():
            t = held()
            if t is not None and t.data_ptr() != address:
                gone = _described(t)
        if gone:
            raise RuntimeError(
                f"graph_step: memory that the captured step uses was freed or moved ({gone}). "
                "Change tensors in place, or call graph_step again"
            )
