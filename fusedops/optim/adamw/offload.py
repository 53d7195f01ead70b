"""AdamW's offloading: keeps GPU parameters' states on the CPU, and runs their steps there.

A side stream copies a chunk's parameters and gradients to the host. The CPU steps the chunk, and
another stream copies the parameters back, so that both directions of the bus and the CPU work at
once:

    fetching   0 1 2 3   4   5          chunk 4 reuses chunk 0's slot once that is sent
    the CPU        0   1   2   3   4   5
    sending          0   1   2   3   4   5

Between steps the host keeps only the states, not the parameters: a host copy with a version counter
would miss writes through `p.data`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedops.extension import _C
from fusedops.functional.adamw import FLOATS
from fusedops.optim.adamw.shard import local, with_local
from fusedops.optim.adamw.state import MAXIMUM, MOMENTS, REST, SCALES, STEP, WRITTEN, Group, State
from fusedops.references.adamw import BLOCK, KINDS

DEVICES = ("cuda",)  # devices whose states can be offloaded
CHUNK = 32 << 20  # bytes of parameters and gradients: about 1 ms of bus time
SLOTS = 4  # chunks on the host at once: one is stepped, one sent, two arrive
ALIGNMENT = 64  # bytes

Copies = list[tuple[Tensor, Tensor]]  # (destination, source)


def offloads(p: Tensor, group: Group) -> bool:
    """Whether a parameter's state is on the host while the parameter is not."""
    return group["offload"] == "cpu" and p.device.type in DEVICES and p.dtype in FLOATS


def home(p: Tensor, group: Group) -> Tensor:
    """The tensor that a parameter's state is created like.

    This is the parameter itself; or, for an offloaded state, a host tensor of its shape and dtype
    without memory of its own.
    """
    if not offloads(p, group):
        return p
    part = torch.empty((), dtype=p.dtype, device="cpu").expand(local(p).shape)
    return with_local(p, part)


def hosted(state: State, device: torch.device) -> State:
    """Moves the state's tensors to the host: contiguous, and pinned for GPU parameters."""
    for name in WRITTEN:
        if name in state:
            state[name] = _hosted(state[name], pins(device))
    return state


def _hosted(t: Tensor, pinned: bool) -> Tensor:
    part = local(t).cpu().contiguous()
    part = part.pin_memory() if pinned else part
    return t if part is local(t) else with_local(t, part)


def pins(device: torch.device) -> bool:
    """Whether the device copies to and from pinned memory asynchronously."""
    return device.type == "cuda"


def refuse_capture(device: torch.device) -> None:
    """Raises RuntimeError while a CUDA graph is being captured."""
    if capturing(device):
        raise RuntimeError(
            "AdamW: offload must be None while a CUDA graph is captured, because the graph would "
            f"lack the CPU's part of a step; got 'cpu' for parameters on {device}"
        )


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Offloaded:
    """One device's parameters with states on the host; has AdamWBucket's interface.

    params: tensors on a device, or DTensors with local parts there. states: what `hosted` returns
    for each. kinds: as in AdamWBucket.
    """

    def __init__(self, params: list[Tensor], states: list[State], kinds: list[int]) -> None:
        self.params = params
        self.places = [(p.device, p.shape) for p in params]
        self.bucket = _C.AdamWBucket(params, states, kinds)  # detects changes, and sums squares
        self.streams = Streams(params[0].device)
        self.steps: Copies = []  # (a piece's step, its parameter's step)
        pieces = []
        for i, (p, state) in enumerate(zip(params, states, strict=True)):
            cut = pieces_of(p, state, kinds[KINDS * i : KINDS * (i + 1)])
            self.steps += [(piece.state[STEP], state[STEP]) for piece in cut[1:]]
            pieces += cut
        self.chunks = chunks_of(pieces, pins(params[0].device))

    def unchanged(self, state: dict[Tensor, State]) -> bool:
        """Whether the optimizer has the same states and no parameter was moved."""
        places = ((p.device, p.shape) for p in self.params)
        return self.bucket.unchanged(state) and all(map(tuple.__eq__, places, self.places))

    def squares(self) -> Tensor | None:
        """The sum of the gradients' squares, on the device."""
        return self.bucket.squares()

    def renew_table(self, captured: bool) -> None:
        """Part of AdamWBucket's interface: there is no table, and capture is refused."""
        refuse_capture(self.streams.device)

    @torch.no_grad()
    def step(
        self,
        options: list[float],
        lrs: list[Tensor],
        seed: int,
        squares: Tensor | None,
        max_grad_norm: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Steps the parameters that have gradients. The arguments are AdamWBucket's, on the device.

        Returns when the CPU is done and the copies back are queued; the current stream waits for
        them. The host waits only for copies from the device.
        """
        streams = self.streams
        streams.begin()
        norm, scale, inf, *rates = streams.numbers([squares, grad_scale, found_inf, *lrs])
        for piece_step, step in self.steps:
            piece_step.copy_(step)
        arrived = [streams.fetch(chunk.begin()) for chunk in self.chunks[:SLOTS]]
        try:
            for i, chunk in enumerate(self.chunks):
                arrived[i].synchronize()  # the first wait covers the numbers, queued before it
                chunk.bucket.step(options, rates, seed, norm, max_grad_norm, scale, inf)
                sent = streams.send(chunk.results())
                if i + SLOTS < len(self.chunks):
                    streams.free(sent)
                    arrived.append(streams.fetch(self.chunks[i + SLOTS].begin()))
        finally:
            streams.end()
        # writing a DTensor's local part does not change the DTensor's version
        increment_version([p for p in self.params if p.grad is not None])


class Streams:
    """A device's side streams: the only class that handles streams and events.

    On a CPU they do nothing, and copies are immediate.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.fetching, self.sending = (self.module.Stream(device) for _ in range(2))

    def begin(self) -> None:
        """Makes fetching wait for pending writes on the device and for sends from its slots."""
        self.fetching.wait_stream(self.module.current_stream(self.device))
        self.fetching.wait_stream(self.sending)

    def numbers(self, tensors: list[Tensor | None]) -> list[Any]:
        """Queues copies to the host; they are complete when the next fetch is."""
        on_device = [t for t in tensors if t is not None]
        pinned = pins(self.device)
        on_host = [torch.empty_like(t, device="cpu", pin_memory=pinned) for t in on_device]
        self.fetch(list(zip(on_host, on_device, strict=True)))
        copies = iter(on_host)
        return [None if t is None else next(copies) for t in tensors]

    def fetch(self, copies: Copies) -> Any:
        """Queues copies from the device and returns an event that marks their end."""
        return self._queue(self.fetching, copies)

    def send(self, copies: Copies) -> Any:
        """Queues copies to the device and returns an event that marks their end."""
        return self._queue(self.sending, copies)

    def free(self, sent: Any) -> None:
        """Lets later fetches reuse the buffer that was just sent."""
        self.fetching.wait_event(sent)

    def end(self) -> None:
        """Makes the current stream wait until everything is sent."""
        self.module.current_stream(self.device).wait_stream(self.sending)

    def _queue(self, stream: Any, copies: Copies) -> Any:
        with self.module.stream(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
        event = self.module.Event()
        event.record(stream)
        return event


@dataclass
class OffloadedPiece:
    """Slices of a parameter's first dimension, which the CPU kernel treats as one tensor."""

    owner: Tensor  # the parameter
    part: slice | EllipsisType
    state: State  # the slices' state, with its own step
    kind: list[int]

    def of(self, t: Tensor) -> Tensor:
        """The same slices of a tensor like the parameter, for example its gradient."""
        return local(t)[self.part]

    @property
    def nbytes(self) -> int:
        """Bytes on the host for parameter and gradient."""
        return 2 * _aligned(self.of(self.owner).nbytes)


def pieces_of(p: Tensor, state: State, kind: list[int]) -> list[OffloadedPiece]:
    """Cuts a parameter into chunk-sized pieces of whole slices, at block boundaries.

    A piece uses the same random numbers and scales as its elements do in the whole parameter.
    """
    part = local(p)
    count = -(-2 * part.nbytes // CHUNK)
    if count < 2 or part.dim() == 0:
        return [OffloadedPiece(p, ..., state, kind)]
    group, rounding, index, row, first = kind
    slices, each = part.shape[0], part.shape[1:].numel()
    grain = 1 if row else BLOCK // math.gcd(each, BLOCK)  # slices between possible cuts
    taken = -(-slices // (count * grain)) * grain
    pieces = []
    for begin in range(0, slices, taken):
        end = min(begin + taken, slices)
        blocks = [n * -(-each // BLOCK) if row else -(-n * each // BLOCK) for n in (begin, end)]
        piece_state = _state_of_part(state, slice(begin, end), slice(*blocks), first=begin == 0)
        piece_kind = [group, rounding, index, row, first + blocks[0]]
        pieces.append(OffloadedPiece(p, slice(begin, end), piece_state, piece_kind))
    return pieces


def _state_of_part(state: State, part: slice, blocks: slice, first: bool) -> State:
    """Views of the state. Each piece counts up its step, so only the first has the real one."""
    views = {name: local(state[name])[part] for name in (*MOMENTS, MAXIMUM, REST) if name in state}
    views |= {name: local(state[name]).view(-1)[blocks] for name in SCALES if name in state}
    return views | {STEP: state[STEP] if first else state[STEP].clone()}


class Chunk:
    """Pieces that are fetched, stepped and sent together."""

    def __init__(self, pieces: list[OffloadedPiece], slot: Tensor) -> None:
        """slot: uint8 host memory for the pieces; other chunks use it at other times."""
        self.pieces = pieces
        likes = [piece.of(piece.owner) for piece in pieces]
        views = list(_laid_out(slot, [*likes, *likes]))
        self.params, self.grads = views[: len(pieces)], views[len(pieces) :]
        kinds = [number for piece in pieces for number in piece.kind]
        self.bucket = _C.AdamWBucket(self.params, [piece.state for piece in pieces], kinds)

    def begin(self) -> Copies:
        """The copies that a step needs, for the pieces that have a gradient now."""
        copies = []
        for piece, param, grad in zip(self.pieces, self.params, self.grads, strict=True):
            owner_grad = piece.owner.grad
            param.grad = None if owner_grad is None else grad
            if owner_grad is not None:
                copies += [(param, piece.of(piece.owner)), (grad, piece.of(owner_grad))]
        return copies

    def results(self) -> Copies:
        """The copies that send the stepped parameters back."""
        return [
            (piece.of(piece.owner), param)
            for piece, param in zip(self.pieces, self.params, strict=True)
            if param.grad is not None
        ]


def chunks_of(pieces: list[OffloadedPiece], pinned: bool) -> list[Chunk]:
    """Groups neighbours into chunks of at most CHUNK bytes; chunk i uses slot i % SLOTS."""
    groups: list[list[OffloadedPiece]] = []
    room = -1
    for piece in pieces:
        if piece.nbytes > room:
            groups.append([])
            room = CHUNK
        groups[-1].append(piece)
        room -= piece.nbytes
    size = max(sum(piece.nbytes for piece in group) for group in groups)
    slots = [
        torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        for _ in range(min(SLOTS, len(groups)))
    ]
    return [Chunk(group, slots[i % SLOTS]) for i, group in enumerate(groups)]


def _laid_out(memory: Tensor, likes: list[Tensor]) -> Iterable[Tensor]:
    """Consecutive contiguous views of uint8 memory, with the given shapes and dtypes."""
    begin = 0
    for like in likes:
        yield memory[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
        begin += _aligned(like.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
