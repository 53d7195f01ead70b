"""Determines which backends can run here, and forces one on request.

By default an operator's device decides: csrc/cpu on CPUs, csrc/cuda (or Triton, for kernels that it
lacks) on GPUs, differentiable ATen calls elsewhere.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedops import notice, references
from fusedops.extension import _C, FIX, UNCOMPILED, repairing

BACKENDS = ("cpu", "cuda", "triton", "simt", "reference")

# Family: its operators.
FAMILIES = {
    "norm": ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    "gated_activation": ("swiglu", "geglu"),
    "linear": ("linear",),
    "quantized_linear": ("quantized_linear",),
    "rotary": ("rotary_embedding",),
    "cross_entropy": ("cross_entropy", "linear_cross_entropy", "linear_log_probs"),
    "attention": ("attention",),
    "experts": ("experts",),
    "adamw": ("adamw_step", "adamw_squares", "adamw_scale"),
}

# Operators that a family's functions call under another name.
UNNAMED = {
    "attention": ("cached_attention",),
    "norm": ("rms_norm_quantized", "add_rms_norm_quantized"),
    "gated_activation": ("swiglu_quantized",),
    "experts": ("quantized_experts",),
}

# A family's kernel operators, if they are not `<family>_forward` and `<family>_backward`.
KERNELS = {
    "adamw": FAMILIES["adamw"],
    "attention": ("attention_forward", "attention_backward", "cached_attention_forward"),
    "cross_entropy": (
        "cross_entropy_forward",
        "cross_entropy_backward",
        "linear_cross_entropy_forward",
        "linear_cross_entropy_backward",
        "linear_log_probs_forward",
        "linear_log_probs_backward",
    ),
    "experts": (
        "experts_forward",
        "experts_backward",
        "quantized_experts_forward",
        "quantized_experts_backward",
    ),
    "norm": ("norm_forward", "norm_backward", "norm_quantized"),
    "gated_activation": (
        "gated_activation_forward",
        "gated_activation_backward",
        "gated_activation_quantized",
    ),
    "quantized_linear": (
        "quantized_linear_forward",
        "quantized_linear_backward",
        "quantized_linear_tiles",
        "dequantize_weight",
    ),
}

SIMT_KEY = "PrivateUse1"  # where csrc/cuda/stream.h registers the emulated kernels


@dataclass(eq=False)  # blocks compare by identity
class _Block:
    name: str


_blocks: list[_Block] = []  # in order of entry, across threads
_overrides: list[torch.library.Library] = []  # implements the last block
_lock = threading.RLock()  # guards _blocks and _overrides
_any_size = False  # `linear` runs its kernel at any size


def unavailable(op: str, backend: str) -> str | None:
    """Why `backend` cannot run operator `op` on this machine; None if it can."""
    family = _family(op)
    if backend == "reference":
        return None
    if backend == "cpu":
        return _cpu_unavailable()
    if backend == "cuda":
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        if family in _WITH_CUDA:
            return None
        return uncompiled() or "this build has no CUDA kernels"
    if backend == "triton":
        return _triton_unavailable(family)
    if backend == "simt":
        if _has_kernel(family, SIMT_KEY):
            return None
        return uncompiled() or _simt_missing(family)
    raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def uncompiled() -> str | None:
    return f"no compiled part: {UNCOMPILED}. {FIX}".strip() if UNCOMPILED else None


def _cpu_unavailable() -> str | None:
    return uncompiled() or ("this CPU has no AVX2" if _C.cpu_isa() == "none" else None)


def _simt_missing(family: str) -> str:
    """Why no emulated CUDA kernel of this family runs here."""
    if any(_has_kernel(other, SIMT_KEY) for other in FAMILIES):
        return "its CUDA kernels cannot be emulated"
    return "this build has no emulated CUDA kernels (FUSEDOPS_SIMT=1 adds them)"


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run every operator on one backend: "cpu", "cuda", "triton", "simt" or "reference".

    For tests, and for finding a wrong kernel. The setting is process-wide until the block ends. If
    blocks overlap, in any threads, the one entered last wins. Entering and leaving a block changes
    torch's dispatcher, so no other thread may run an operator at that moment. Code already compiled
    by torch.compile keeps its kernels. The environment variable FUSEDOPS_BACKEND does the same for
    a whole process. Raises ValueError for an unknown name, and RuntimeError, with the reason, if no
    operator can run on it.
    """
    reasons = {op: unavailable(op, name) for ops in FAMILIES.values() for op in ops}
    if all(reasons.values()):
        raise RuntimeError(f"backend {name!r} cannot run: {next(iter(reasons.values()))}")
    block = _Block(name)
    leave = functools.partial(_leave, block)  # a local: globals may be None when Python ends
    try:
        _enter(block)
        yield
    finally:
        leave()


def _enter(block: _Block) -> None:
    with _lock:
        _blocks.append(block)
        _follow()


def _leave(block: _Block, ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """The dispatcher follows the blocks that are left; nothing happens while Python shuts down."""
    if ending():
        return
    with _lock:
        if block in _blocks:
            _blocks.remove(block)
        _follow()


def forced() -> str | None:
    """The backend that is forced; None if devices decide."""
    return next((block.name for block in reversed(_blocks)), None)


def takes(name: str, device: str) -> bool:
    """Whether a backend takes tensors on a device."""
    return name == "reference" or _runs_on(name) == device.upper()


def _family(op: str) -> str:
    return next(family for family, ops in FAMILIES.items() if op in ops)


def operators(family: str) -> tuple[str, ...]:
    return *FAMILIES[family], *UNNAMED.get(family, ())


def kernels(family: str) -> tuple[str, ...]:
    return KERNELS.get(family, (f"{family}_forward", f"{family}_backward"))


def _has_only_kernels(family: str) -> bool:
    """Whether a family's operators are the kernels themselves, with nothing above them."""
    return kernels(family) == FAMILIES[family]


def _has_kernel(family: str, key: str) -> bool:
    return _is_kernel(kernels(family)[0], key)


def _is_kernel(name: str, key: str) -> bool:
    return not UNCOMPILED and torch._C._dispatch_has_kernel_for_dispatch_key(
        f"fusedops::{name}", key
    )


def _triton_unavailable(family: str) -> str | None:
    if UNCOMPILED:
        return uncompiled()
    if not _interpreting() and not torch.cuda.is_available():
        return "torch finds no CUDA device (set TRITON_INTERPRET=1 to run the interpreter)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None if family in _TRITON else "this family has no Triton kernel"


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _follow() -> None:
    """Makes the dispatcher use the innermost forced backend only.

    If this is interrupted at any line, the next call completes it.
    """
    name = forced()
    _follow_linear()
    while _overrides:
        _overrides[-1]._destroy()
        _overrides.pop()
    if name is not None and not UNCOMPILED:  # else the reference runs anyway
        _overrides.append(torch.library.Library("fusedops", "IMPL"))
        with _no_override_warning():
            for family in FAMILIES:
                _force(_overrides[0], family, name)


def linear_of_any_size(asked: bool) -> bool:
    """Sets whether `linear` runs its kernel at any size. Returns the earlier setting."""
    global _any_size
    earlier, _any_size = _any_size, asked
    _follow_linear()
    return earlier


def _follow_linear() -> None:
    """Tells `linear` to run its kernel at every size while a backend is forced."""
    while True:  # until no other thread has changed it in between
        always = bool(_blocks) or _any_size
        _C.linear_always(always)
        if always == (bool(_blocks) or _any_size):
            return


def _force(library: torch.library.Library, family: str, name: str) -> None:
    if name == "reference":
        keys = ["CPU", "CUDA"] if _has_only_kernels(family) else ["CompositeImplicitAutograd"]
        for op, key in itertools.product(operators(family), keys):
            library.impl(op, references.later(family, f"{op}_reference"), key)
        return
    reason = unavailable(FAMILIES[family][0], name)
    runs_on = _runs_on(name)
    for key in {"CPU", "CUDA"} - (set() if reason else {runs_on}):
        for op in operators(family):
            library.impl(op, _refusal(op, name, reason or _is_elsewhere(op, name, key)), key)
    if name == "triton" and not reason:
        _register_triton(library, family, runs_on)
    if name == "simt" and not reason:
        _register_simt(library, family)


def _runs_on(name: str) -> str:
    """The dispatch key of the tensors that a backend takes."""
    on_cpu = name in ("cpu", "simt") or (name == "triton" and _interpreting())
    return "CPU" if on_cpu else "CUDA"


def _is_elsewhere(op: str, name: str, key: str) -> str:
    first = getattr(torch.ops.fusedops, op).default._schema.arguments[0].name
    interprets = name == "triton" and key == "CPU"
    hint = " (set TRITON_INTERPRET=1 to run the interpreter)" if interprets else ""
    return f"{first} is on {key.lower()}{hint}"


def _refusal(op: str, name: str, reason: str) -> Callable:
    def refuse(*args, **kwargs):
        raise RuntimeError(f"{op}: backend {name!r} cannot run: {reason}")

    return refuse


def _register_triton(
    library: torch.library.Library,
    family: str,
    key: str,
    names: Sequence[str] = (),
    warns: bool = False,
) -> None:
    """names: the kernels to register, all by default. warns: warn at the first call."""
    for name in names or kernels(family):
        library.impl(name, _triton_kernel(family, name, warns), key)


def _register_simt(library: torch.library.Library, family: str) -> None:
    """Sends CPU tensors to the kernels that are registered for SIMT_KEY."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, SIMT_KEY))
    for name in kernels(family):
        operator = getattr(torch.ops.fusedops, name).default
        library.impl(operator, functools.partial(operator.redispatch, keys), "CPU")


def _triton_kernel(family: str, name: str, warns: bool) -> Callable:
    """The Triton function behind an operator; triton is imported at the first call."""

    @functools.cache
    def kernel():
        if warns:
            families = ", ".join(family for family in _TRITON if family not in _WITH_CUDA)
            notice.warn_once(
                f"fusedops was built without CUDA kernels, so Triton kernels run {families}"
            )
        return getattr(importlib.import_module(f"fusedops.triton.{family}"), name)

    return lambda *args: kernel()(*args)


@contextmanager
def _no_override_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        yield


def _register_references(kept: ExitStack) -> None:
    """Registers references for operators without a composite or a kernel."""
    missing = [
        (family, name, key)
        for family, names in FAMILIES.items()
        if _has_only_kernels(family)
        for name in names
        for key, has in (("CPU", _cpu_unavailable() is None), ("CUDA", family in _WITH_CUDA))
        if not has
    ]
    if not missing:
        return
    library = torch.library.Library("fusedops", "IMPL")
    kept.push(lambda *_: library._destroy())
    with _no_override_warning():
        for family, name, key in missing:
            library.impl(name, references.later(family, f"{name}_reference"), key)


def _register_triton_defaults(kept: ExitStack) -> None:
    """Registers Triton kernels for CUDA tensors where there is no C++ kernel.

    It does not look for a device: that would initialise CUDA, after which a process can neither
    fork nor change CUDA_VISIBLE_DEVICES.
    """
    if importlib.util.find_spec("triton") is None:
        return
    library = torch.library.Library("fusedops", "IMPL")
    kept.push(lambda *_: library._destroy())
    for family in _TRITON:
        missing = [name for name in kernels(family) if not _is_kernel(name, "CUDA")]
        if missing:
            _register_triton(library, family, "CUDA", missing, warns=family not in _WITH_CUDA)


def _register_defaults() -> ExitStack:
    """Registers Triton or references where C++ has no kernel, and forces FUSEDOPS_BACKEND."""
    kept = ExitStack()
    if not UNCOMPILED:
        _register_references(kept)
        _register_triton_defaults(kept)
    if os.environ.get("FUSEDOPS_BACKEND") and not repairing():
        kept.enter_context(backend(os.environ["FUSEDOPS_BACKEND"]))
    return kept


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


# Families with kernels in fusedops/triton, and with CUDA C++ in this build.
_TRITON = tuple(f for f in FAMILIES if importlib.util.find_spec(f"fusedops.triton.{f}"))
_WITH_CUDA = frozenset(family for family in FAMILIES if _has_kernel(family, "CUDA"))
_defaults = _register_defaults()
