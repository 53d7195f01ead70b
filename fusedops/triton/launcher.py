"""Launches Triton kernels through csrc/python/launcher.cpp once Triton has compiled them.

The first call of a variant goes through Triton. Later calls with the same key go straight to
`cuLaunchKernel`. Everything that is unusual goes through Triton each time: another Triton than the
proven ones, launch hooks, callable grids, kernels that need scratch memory or clusters, tensors of
other devices.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs

from fusedops.extension import _C

# Their keys and their launches were compared with ours: `python -m checks launcher`.
PROVEN = ("3.6.0", "3.7.0", "3.8.0", "3.9.0")
OPTIONS = {"num_warps", "num_stages", "maxnreg", "enable_fp_fusion"}
# The types of a kernel's arguments: kind and bits, as csrc/python/launcher.cpp packs them.
TYPES = {f"{kind}{bits}": (kind, bits) for kind in "iu" for bits in (8, 16, 32, 64)}
TYPES |= {"u1": ("u", 8), "i1": ("i", 8), "fp32": ("f", 32), "fp64": ("f", 64)}
WARP = 32

Packed = tuple[int, str, int]  # parameter, kind, bits
Globals = list[tuple[dict, str, Any]]
Variant = tuple[int, int, int, list[Packed], Globals, tuple[int, int, int]]


class Kernel:
    """A compiled kernel: `kernel[grid](*args, **kwargs)` launches it, as Triton's own does."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        parameters = [
            (
                p.name,
                p.is_constexpr,
                not p.do_not_specialize,
                not p.do_not_specialize_on_alignment,
                (p.default,) if p.has_default else (),
            )
            for p in jit.params
        ]
        runtime, compilation = knobs.runtime, knobs.compilation
        # Triton's key has these too.
        options = [(jit, "debug"), (runtime, "debug"), (compilation, "instrumentation_mode")]
        options.append((runtime, "add_stages_inspection_hook"))
        if hasattr(compilation, "fpsan_homomorphic_casts"):
            options.append((compilation, "fpsan_homomorphic_casts"))
        hooks = [(runtime, "launch_enter_hook"), (runtime, "launch_exit_hook")]
        hooks.append((jit, "pre_run_hooks"))
        self.launch, self.key = _C.triton_launcher(
            parameters,
            options,
            hooks,
            knobs.HookChain,
            triton.runtime.driver,
            self.first,
            self.through_triton,
        )

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.launch, grid)

    def through_triton(self, grid: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.jit.run(*args, grid=grid, warmup=False, **kwargs)

    def first(self, grid: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Variant | None]:
        """Launches a variant's first call. Returns the kernel, and how to launch it without Triton.

        That is None if only Triton can launch it.
        """
        kernel = self.through_triton(grid, *args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        names = [p.name for p in self.jit.params]
        if kernel is None or not kwargs.keys() - names <= OPTIONS or not launches_plainly(kernel):
            return kernel, None
        device = triton.runtime.driver.active.get_active_torch_device()
        types = [(i, kernel.src.signature[name]) for i, name in enumerate(names)]
        packed = [(i, *kind_of(t)) for i, t in types if t != "constexpr"]
        if any(t.device != device for t in tensors) or any(not kind for _, kind, _ in packed):
            return kernel, None
        used = [(space, name, space[name]) for (name, _), (_, space) in globals_of(self.jit)]
        warps, _, shared = kernel.packed_metadata
        return kernel, (kernel.function, WARP * warps, shared, packed, used, driver_functions())


def globals_of(jit: Any) -> Any:
    """Triton raises an error if one of these has changed since the kernel was compiled."""
    return jit.used_global_vals.items()


def kind_of(type_: Any) -> tuple[str, int]:
    """A type's kind and bits; an empty kind for types that only Triton packs."""
    if isinstance(type_, str) and type_.startswith("*"):
        return "*", 64
    return TYPES.get(type_, ("", 0))


def launches_plainly(kernel: Any) -> bool:
    """Whether a launch needs no more than a grid, a block, shared memory and the arguments."""
    about = kernel.metadata
    return (
        type(kernel.run).__name__ == "CudaLauncher"
        and about.target.backend == "cuda"
        and about.target.warp_size == WARP
        and about.num_ctas == 1
        and not about.launch_cooperative_grid
        and not about.launch_pdl
        and not about.global_scratch_size
        and not about.profile_scratch_size
        and not about.instrumentation_mode
        and not getattr(about, "tensordesc_meta", None)
        and about.shared <= 227 * 1024  # more takes an attribute of the launch
    )


@functools.cache
def driver_functions() -> tuple[int, int, int]:
    """The addresses of the driver's functions, from the library that Triton has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    names = ("cuLaunchKernel", "cuCtxGetCurrent", "cuGetErrorString")
    launch, context, text = (
        ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0 for name in names
    )
    return launch, context, text


def available() -> bool:
    """Whether this Triton's launches are proven, and the compiled part is there.

    FUSEDOPS_LAUNCHER=triton leaves all launches to Triton.
    """
    choice = os.environ.get("FUSEDOPS_LAUNCHER", "")
    if choice not in ("", "triton"):
        raise ValueError(f"FUSEDOPS_LAUNCHER must be 'triton' or empty, got {choice!r}")
    return not choice and triton.__version__ in PROVEN and hasattr(_C, "triton_launcher")
