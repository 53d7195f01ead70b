"""Defines Evidence: the measurements of a profiled step, as plain data that JSON can hold.

`judge` reads an Evidence and nothing else, so a saved Evidence gives the same verdict on every
machine. Times are seconds and sizes are bytes. A part that was not measured is None, and
`not_checked` says why.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Autocast",
    "Ceilings",
    "Copies",
    "Evidence",
    "Gpu",
    "Loader",
    "Op",
    "OptimizerTime",
    "Patching",
    "Profiled",
    "Reserved",
    "Run",
    "SiteTime",
    "Sync",
    "Tokens",
    "from_json",
]

VERSION = 1


@dataclass(frozen=True)
class Run:
    """Consecutive or interleaved steps of one kind, without a profiler.

    seconds: wall time of each step, the fetch of its batch included. wait: the part in `next` of
    the data. forward, optimizer: the parts in the model's forward and the optimizer's step; zeros
    where neither was seen. cpu: CPU time of the thread that called the step. preempted: time in
    which that thread was ready to run but other threads had the CPUs. user, system: CPU time
    of all threads of the process, over the whole run. faults: page faults. voluntary, involuntary:
    context switches of the process. throttled: seconds in which the cgroup was throttled. steal:
    share of the machine's CPU time that the hypervisor withheld. paired: whether the run was
    interleaved with others. The i-th steps of paired runs were timed in the same round.

    On a GPU the host waits for it at the end of each step. on_gpu: each step's time between two
    CUDA events. synced: the part of the wall time in that last wait.
    """

    seconds: tuple[float, ...]
    wait: tuple[float, ...] = ()
    forward: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()
    cpu: tuple[float, ...] = ()
    preempted: tuple[float, ...] = ()
    user: float = 0.0
    system: float = 0.0
    faults: int = 0
    voluntary: int = 0
    involuntary: int = 0
    throttled: float = 0.0
    steal: float = 0.0
    paired: bool = False
    on_gpu: tuple[float, ...] = ()
    synced: tuple[float, ...] = ()

    @property
    def running(self) -> tuple[float, ...]:
        """Each step's time without the part in which the thread was preempted."""
        throttled = self.throttled / max(1, len(self.seconds))  # not another program's doing
        return _without(self.seconds, [p - throttled for p in self.preempted])


def _without(seconds: tuple[float, ...], preempted: Sequence[float]) -> tuple[float, ...]:
    """Each step's time without a part of it; all of it where that is not known."""
    if not preempted:
        return seconds
    return tuple(max(0.02 * s, s - max(0.0, p)) for s, p in zip(seconds, preempted, strict=True))


@dataclass(frozen=True)
class Loader:
    """The data, and how fast it can deliver.

    workers: processes of a DataLoader. asynchronous: whether batches are made while the step runs.
    batches_per_s: the loader alone; None where the data ended before it was measured. functions:
    share of the fetching time spent in the slowest Python functions, `name (file:line)` -> share.
    batches: how many a step fetches, for an evaluation or accumulated gradients.
    """

    workers: int = 0
    asynchronous: bool = False
    batches_per_s: float | None = None
    functions: dict[str, float] = field(default_factory=dict)
    batches: float = 1.0


@dataclass(frozen=True)
class Tokens:
    """Tokens or samples of a step: real ones, all with padding, and the size of the batch."""

    real: float | None = None
    padded: float | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches, with the threads that the step uses.

    copy: (working set in bytes, bytes/s read and written) from the caches to memory. flops: dtype
    -> FLOP/s of a large matrix product. op_seconds: a call of an operator on one element.
    fault_seconds: one page fault, with zeroing. event_seconds: torch.profiler's cost an event.
    """

    copy: tuple[tuple[int, float], ...]
    flops: dict[str, float]
    op_seconds: float
    fault_seconds: float
    event_seconds: float


@dataclass(frozen=True)
class Op:
    """The calls of one operator with the same shapes, from the same module, in one step.

    flops: of all calls. traffic: (reuse distance, bytes) pairs of all calls; the distance is how
    many bytes were used since these bytes were used last, and says which cache they can be in.
    seconds: all calls, inclusive of what they call, once for each profiled step, not corrected for
    the profiler. events: the profiler's events in all calls.
    """

    name: str
    shapes: str
    dtype: str
    module: str
    calls: int
    flops: int
    traffic: tuple[tuple[int, int], ...]
    seconds: tuple[float, ...]
    events: int

    @property
    def bytes(self) -> int:
        """Bytes read and written by all calls."""
        return sum(size for _, size in self.traffic)


@dataclass(frozen=True)
class Profiled:
    """Steps under torch.profiler, those in which other programs disturbed least.

    seconds: wall time of each. preempted: the part in which other programs had the CPU. events: the
    profiler's, a step.
    """

    seconds: tuple[float, ...]
    events: int
    ops: tuple[Op, ...]
    preempted: tuple[float, ...] = ()

    @property
    def running(self) -> tuple[float, ...]:
        """Each step's time without the part in which the thread was preempted."""
        return _without(self.seconds, self.preempted)


@dataclass(frozen=True)
class Sync:
    """A point where the host waits for the GPU. gap: seconds of idle GPU after it, a step."""

    where: str
    gap: float


@dataclass(frozen=True)
class Copies:
    """Bytes that a step copies to the GPU. exposed: seconds that nothing else on it overlaps."""

    pinned: int = 0
    pageable: int = 0
    exposed: float = 0.0


@dataclass(frozen=True)
class Reserved:
    """Bytes of torch's caching allocator after the steps, and the most since the program began.

    slack: reserved and not in use by a tensor.
    """

    allocated: int
    reserved: int
    peak_allocated: int

    @property
    def slack(self) -> int:
        return self.reserved - self.allocated


@dataclass(frozen=True)
class Gpu:
    """What a GPU did in a step.

    busy: share of the step in which a kernel ran that is no collective. host_waits: share in which
    the host waited for the GPU. kernels: launches a step. median_kernel: seconds. syncs: outside
    the reading of the loss. exposed_communication: seconds of collectives that no kernel overlaps.
    alloc_retries, mallocs: of the caching allocator, a step; malloc_seconds: their time. slowed_by:
    why the clock is lowered, if it is. reserved: None where it was not read.
    """

    busy: float
    host_waits: float
    kernels: int
    median_kernel: float
    syncs: tuple[Sync, ...] = ()
    exposed_communication: float = 0.0
    alloc_retries: float = 0
    mallocs: float = 0
    malloc_seconds: float = 0.0
    slowed_by: tuple[str, ...] = ()
    copies: Copies = Copies()
    reserved: Reserved | None = None


@dataclass(frozen=True)
class SiteTime:
    """The calls of one kind with the same shapes in one step, before and after a change.

    The change is patch or autocast. name: the module's class, or the function.
    before, after: seconds of a call, forward and backward, in pairs of blocks. bytes: how many
    fewer all calls hold at the step's peak.
    """

    kind: str
    name: str
    shapes: str
    calls: int
    before: tuple[float, ...]
    after: tuple[float, ...]
    bytes: int = 0


@dataclass(frozen=True)
class Patching:
    """What `fusedops.patch` would fuse. sites: kind -> number.

    timed: the calls that then run a kernel. left: how many would run torch's code as before. Both
    are empty if no step was tried.
    """

    sites: dict[str, int]
    timed: tuple[SiteTime, ...] = ()
    left: int = 0


@dataclass(frozen=True)
class OptimizerTime:
    """A step of the user's optimizer, and of another one on the same tensors.

    name: of the other. share: of the user's elements that the tensors have. before, after: seconds
    of a step in pairs of blocks, of the user's optimizer and of the other.
    """

    name: str
    share: float
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class Autocast:
    """A step in bfloat16 autocast. timed: the calls whose tensors then have other dtypes.

    kept: bytes that the forward keeps for backward, as it is and in autocast. left: calls whose
    counterpart was not found.
    """

    timed: tuple[SiteTime, ...]
    kept: tuple[int, int] = (0, 0)
    left: int = 0


@dataclass(frozen=True)
class Evidence:
    """All that was measured of one step.

    plain: steps as they are (E0). cached: the same steps with batches kept in memory (E1). half:
    the same with half the batch (E2). fewer_threads: the same with as many threads as CPUs; only
    where torch uses more. ceilings: E3. profiled: E4. flops: of a step, by dtype. memory: bytes by
    category. activations: bytes saved for backward by module, some of the largest. patching: what
    patch would fuse; None without a model, or for a patched one. autocast: the step's calls in
    bfloat16; None if no step ran there. optimizers: the timed ones that may replace the user's;
    None if no optimizer was timed. recorded: plain are steps that a loop ran by itself; if others
    follow, they ran on batches of the loop, between two of its steps. threads: torch's. cpus: the
    process's, by affinity and cgroup quota.
    """

    plain: Run
    cached: Run | None = None
    half: Run | None = None
    fewer_threads: Run | None = None
    loader: Loader | None = None
    tokens: Tokens = Tokens()
    ceilings: Ceilings | None = None
    profiled: Profiled | None = None
    gpu: Gpu | None = None
    patching: Patching | None = None
    autocast: Autocast | None = None
    optimizers: tuple[OptimizerTime, ...] | None = None
    flops: dict[str, int] | None = None
    memory: dict[str, int] | None = None
    activations: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    cpus: float = 1.0
    processes: int = 1
    communication: float | None = None  # seconds of exposed collectives a step; None: not measured
    recorded: bool = False
    about: dict[str, Any] = field(default_factory=dict)  # device name, versions, date
    not_checked: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def base(self) -> Run:
        """The steps that shares divide: on kept batches, but of a loop its own."""
        return self.plain if self.recorded or self.cached is None else self.cached

    def to_dict(self) -> dict[str, Any]:
        """A dictionary that json.dumps takes and `from_dict` reads."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Evidence":
        """Raises ValueError if the dictionary is not an Evidence of this version."""
        if values.get("version") != VERSION:
            raise ValueError(
                f"profile: evidence must have version {VERSION}, got {values.get('version')!r}"
            )
        return from_json(Evidence, values)


def from_json(kind: Any, value: Any) -> Any:
    """A value of JSON as the annotated type: dataclasses and tuples are restored."""
    if dataclasses.is_dataclass(kind):
        hints, name = typing.get_type_hints(kind), getattr(kind, "__name__", "")
        if unknown := set(value) - set(hints):
            raise ValueError(f"profile: {name} has no field {', '.join(sorted(unknown))}")
        return typing.cast(Any, kind)(**{k: from_json(hints[k], v) for k, v in value.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        chosen = next(item for item in arguments if item is not type(None))
        return None if value is None else from_json(chosen, value)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(from_json(arguments[0], item) for item in value)
        return tuple(from_json(item, v) for item, v in zip(arguments, value, strict=True))
    return value
