"""Checks a CUDA build on a machine without a GPU; checks/cuda_build.py runs it.

It runs in an environment that has torch, numpy, pytest and hypothesis, but no transformers.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fusedops
from fusedops import backends

CUDA = torch.device("cuda")
COMPOSITE = {"linear.linear_backward"}
COMPOSITE |= {f"experts.{name}" for name in backends.kernels("experts")}
OPERATORS = {op: family for family, ops in backends.FAMILIES.items() for op in ops}


def main() -> int:
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {fusedops.extension._C.__file__}")
    failed = [name for name, check in CHECKS.items() if not _passes(name, check)]
    print("\n" + fusedops.env_report())
    return int(bool(failed))


def _passes(name: str, check: Callable[[], str]) -> bool:
    try:
        print(f"{name}: {check()}", flush=True)
    except Exception as error:  # noqa: BLE001 all other checks still run
        print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def imports() -> str:
    assert torch.version.cuda is not None, "this torch has no CUDA"
    assert not torch.cuda.is_initialized(), "import fusedops has initialised CUDA"
    return "CUDA stays uninitialised"


def kernels() -> str:
    """Every kernel has a CUDA implementation, in C++ or Triton, except COMPOSITE's."""
    by = {
        f"{family}.{name}": _registered(name)
        for family in backends.FAMILIES
        for name in backends.kernels(family)
    }
    missing = [name for name, origin in by.items() if origin is None]
    for name in COMPOSITE & {*missing}:
        by[name] = "composite: matrix products of torch's"
        missing.remove(name)
    assert not missing, f"no CUDA kernel: {', '.join(missing)}"
    for op in OPERATORS:
        has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        assert has(f"fusedops::{op}", "CUDA"), f"{op} cannot run on CUDA tensors"
    for family in ("norm", "gated_activation", "rotary", "adamw"):
        origins = [origin for name, origin in by.items() if name.startswith(f"{family}.")]
        assert set(origins) == {"C++"}, f"{family}'s kernels must be in C++, got {origins}"
    return "".join(f"\n  {name:45} {origin}" for name, origin in by.items())


def _registered(name: str) -> str | None:
    """The language of an operator's CUDA kernel; None if it has none or only a reference."""
    lines = torch._C._dispatch_dump(f"fusedops::{name}").splitlines()
    registration = next((line for line in lines if line.startswith("CUDA: ")), "")
    if "csrc/cuda/" in registration:
        return "C++"
    family = next(f for f in backends.FAMILIES if name in backends.kernels(f))
    return "Triton" if "backends.py" in registration and family in backends._TRITON else None


def errors() -> str:
    """Without a device, torch's own error is raised, and the operators go on with CPU tensors."""
    calls: dict[str, Callable[[], object]] = {
        "torch.ones": lambda: torch.ones(2, device=CUDA),
        "nn.RMSNorm": lambda: fusedops.nn.RMSNorm(8, device=CUDA),
        "module.to": lambda: fusedops.nn.Linear(8, 8).to(CUDA),
        "backend": lambda: fusedops.backend("cuda").__enter__(),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, AssertionError) as error:
            messages[name] = str(error).splitlines()[0]
    missing = [name for name in calls if name not in messages]
    assert not missing, f"no error: {missing}"
    assert "finds no CUDA device" in messages["backend"], messages["backend"]
    x = torch.randn(3, 8, requires_grad=True)
    fusedops.functional.rms_norm(x, [8]).sum().backward()
    return "".join(f"\n  {name:12} {message}" for name, message in messages.items())


def report() -> str:
    text = fusedops.env_report()
    assert "no device" in text and fusedops.__version__ in text
    assert "torch finds no CUDA device" in text
    return f"{len(text.splitlines())} lines"


def graphs() -> str:
    """Operators and kernels are traced into FX graphs of CUDA tensors, which need no device."""
    from contract.family import FAMILIES

    traced: set[str] = set()
    for family in FAMILIES.values():
        for call in family.calls.values():
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                args = tuple(_fake(a) for a in call.args(*family.batches[0]))
                positional, named = call.by_name(args)
                graph = make_fx(lambda *a, call=call, named=named: call.function(*a, **named))
                traced |= _operators(graph(*positional))
        for make in family.kernels.values():
            with FakeTensorMode(allow_non_fake_inputs=True):
                for name, args in make(CUDA):
                    op = getattr(torch.ops.fusedops, name)
                    traced |= _operators(make_fx(lambda *a, op=op: op(*a))(*args))
    missing = _all_kernels() - traced
    assert not missing, f"not traced: {', '.join(sorted(missing))}"
    return ", ".join(sorted(traced))


def _all_kernels() -> set[str]:
    """The kernels of all families whose operators are not kernels themselves."""
    families = (f for f in backends.FAMILIES if not backends._has_only_kernels(f))
    return {name for family in families for name in backends.kernels(family)}


def _fake(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
    assert empty.device.type == "cuda"
    return empty


def _operators(graph: torch.fx.GraphModule) -> set[str]:
    """The names of fusedops' operators in a graph, whose results must be on CUDA."""
    fused_nodes = [node for node in graph.graph.nodes if "fusedops" in str(node.target)]
    for node in fused_nodes:
        results = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        elsewhere = [t.device for t in results if t.device.type != "cuda"]
        assert not elsewhere, f"{node.target} makes results on {elsewhere}"
    return {str(node.target).split(".")[1] for node in fused_nodes}


CHECKS = {
    "import": imports,
    "CUDA kernels": kernels,
    "errors without a device": errors,
    "env_report": report,
    "FX graphs of CUDA tensors": graphs,
}

if __name__ == "__main__":
    sys.exit(main())
