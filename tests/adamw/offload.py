"""Simulated GPU streams, and comparisons with and without offloading, for AdamW's tests.

Without a GPU parameters on the CPU are offloaded as a GPU's would be: "at once", with torch's CPU
streams, which do nothing; and "late", with those of `Device`, which take their time.
"""

import random
from collections import deque
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from adamw.training import parameters, params_of, train
from fusedops.optim import AdamW
from fusedops.optim.adamw import offload
from fusedops.optim.adamw.offload import Offloaded

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

PLACES = ["at once", "late", *(["cuda"] if torch.cuda.is_available() else [])]


class Device:
    """Replaces torch.cuda: streams are queues, and any of them may run its next item at any time.

    A copy within `with device.stream(s)` is queued. What waits for an event stays until that is
    reached, and all else happens in an order that is drawn, some streams being slow and some fast:
    a wait that is missing is found.
    """

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = self.Stream()

    def Stream(self, device=None):
        self.streams.append(Stream(self))
        return self.streams[-1]

    def Event(self):
        return Event(self)

    def current_stream(self, device=None):
        return self.current

    @contextmanager
    def stream(self, stream):
        with Queued(stream):
            yield

    def one(self) -> bool:
        """Runs one queued item that may run now, if there is one."""
        ready = [stream for stream in self.streams if stream.ready()]
        if ready:
            self.draw.choices(ready, [stream.speed for stream in ready])[0].one()
        return bool(ready)

    def some(self) -> None:
        while self.draw.random() < 0.4 and self.one():
            pass

    def finish(self) -> None:
        while self.one():
            pass
        assert not any(stream.queue for stream in self.streams), "streams wait for each other"


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.queue, self.queued, self.done = device, deque(), 0, 0
        self.speed = device.draw.choice([0.01, 1, 100])

    def add(self, entry) -> None:
        """Queues an entry: a function to call, or a stream and count to wait for."""
        self.queue.append(entry)
        self.queued += 1
        self.device.some()

    def ready(self) -> bool:
        if not self.queue:
            return False
        entry = self.queue[0]
        return callable(entry) or entry[0].done >= entry[1]

    def one(self) -> None:
        entry = self.queue.popleft()
        if callable(entry):
            entry()
        self.done += 1

    def wait_stream(self, stream) -> None:
        self.add((stream, stream.queued))

    def wait_event(self, event) -> None:
        self.add((event.stream, event.count))


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream) -> None:
        self.stream, self.count = stream, stream.queued

    def synchronize(self) -> None:
        while self.stream.done < self.count:
            assert self.device.one(), "waits for what never happens"


class Queued(TorchFunctionMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.copy_:
            return function(*args, **(kwargs or {}))

        @torch.no_grad()
        def later():
            function(*args)

        self.stream.add(later)
        return args[0]


class Place:
    """A test's device for parameters, and AdamW with their states on the host."""

    def __init__(self, name: str, device: Device | None) -> None:
        self.name = name
        self.at = torch.device("cuda" if name == "cuda" else "cpu")
        self.streams = device

    def put(self, params):
        return [p.detach().to(self.at).requires_grad_() for p in params]

    def adamw(self, params, kind=AdamW, **options):
        return kind(self.put(params), offload="cpu", **options)

    def pair(self, params=parameters, kind=AdamW, **options):
        """Returns an optimizer with its states on the host, and one without, alike."""
        return self.adamw(params(), kind, **options), kind(params(), **options)

    def train_both(self, ours, baseline) -> None:
        """Trains both, and asserts equal bits."""
        self.train(ours), train(baseline)
        self.assert_same(ours, baseline)

    def finish(self) -> None:
        if self.streams is not None:
            self.streams.finish()

    def train(self, optimizer, steps=5, first=1):
        """Like `adamw.training.train`, with this place's optimizer."""
        for i in range(first, first + steps):
            self.gradients(params_of(optimizer), i)
            optimizer.step()
            self.finish()
        return params_of(optimizer)

    def gradients(self, params, seed) -> None:
        draw = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw).to(p)

    def assert_same(self, ours, baseline) -> None:
        """Asserts equal bits, and that our optimizer stepped in chunks."""
        assert_offloaded(ours)
        for p, q in zip(params_of(ours), params_of(baseline), strict=True):
            assert torch.equal(p.cpu(), q)
            state, other = ours.state[p], baseline.state[q]
            assert state.keys() == other.keys()
            for name in state:
                assert state[name].device.type == "cpu"
                assert state[name].dtype == other[name].dtype
                assert torch.equal(state[name], other[name]), name


def assert_offloaded(optimizer) -> None:
    assert any(isinstance(bucket, Offloaded) for _, bucket in optimizer._plan.buckets)


def make_place(name, monkeypatch, seed=0) -> Place:
    """Returns a place with chunks of 6000 bytes: three training tensors are split."""
    monkeypatch.setattr(offload, "CHUNK", 6000)
    device = Device(seed) if name == "late" else None
    if name != "cuda":
        monkeypatch.setattr(offload, "DEVICES", ("cpu",))
    if device is not None:
        monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return Place(name, device)
