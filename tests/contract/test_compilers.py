"""Every operator in torch.compile, torch.export and torch.fx, on meta tensors and subclasses."""

from itertools import product

import pytest
import torch
from calling import Calls
from torch.utils._pytree import tree_leaves

from contract.family import (
    BF16,
    F32,
    FUNCTIONS,
    Call,
    as_tuple,
    device,
    each,
    on,
)
from contract.interpreter import rounds_right
from fusedops.testing import gradients, placed


def _operators(family):
    for name, call in family.calls.items() if family.whole else ():
        for backend, dtype in product(family.backends, [F32, BF16]):
            if rounds_right(backend, dtype=dtype):
                yield f"{name}-{backend}-{dtype}", (call, backend, dtype)


@each("call,backend,dtype", _operators)
def test_opcheck(call, backend, dtype):
    args = call.args(3, dtype=dtype, backend=backend)
    for leaf in call.on_leaves(call.function, args)[1]:
        leaf.requires_grad_()
    with on(backend):
        operator = getattr(torch.ops.fusedops, call.operator)
        torch.library.opcheck(operator, *call.by_name(args))


def _kernels(family):
    """A graph is made of schemas and meta kernels, which all backends share: one is traced."""
    for name, variant in family.kernels.items():
        for backend in family.backends:
            traced = backend == family.backends[0] or device(backend).type != "cpu"
            yield f"{name}-{backend}", (variant, backend, traced)


@each("variant,backend,traced", _kernels)
def test_opcheck_kernels(variant, backend, traced):
    with on(backend):
        for name, args in variant(device(backend)):
            utils = list(torch.library._OPCHECK_DEFAULT_UTILS)
            if not traced:
                utils.remove("test_aot_dispatch_dynamic")
            if any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in args):
                utils.remove("test_schema")  # which multiplies its arguments
            torch.library.opcheck(getattr(torch.ops.fusedops, name), args, test_utils=utils)


@each("variant", lambda family: ((n, (v,)) for n, v in family.kernels.items()))
def test_kernels_arguments_are_on_the_device_that_is_asked_for(variant):
    """Else the tests of kernels on a GPU would run those of a CPU."""
    for _, args in variant(torch.device("meta")):
        tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        assert {t.device.type for t in tensors} == {"meta"}


def _traced(family):
    """Every call on a backend, and one on the others: a graph is the same on all."""
    for place, (name, call) in enumerate(family.calls.items()):
        for backend in family.backends if place == 0 else family.backends[:1]:
            yield f"{name}-{backend}", (call, backend)


def _compiled(family):
    """Inductor compiles a family's first call; the others stop at the graphs that it would get."""
    compiler = "inductor"
    for name, (call, backend) in _traced(family):
        for options in family.compilers:
            yield f"{name}-{options}", (call, backend, {"backend": compiler} | options)
            compiler = "aot_eager"


@each("call,backend,options", _compiled)
def test_compile_with_new_shapes(call, backend, options):
    torch.compiler.reset()  # what was compiled keeps its backend

    def step(x, *rest, **named):
        return call.function(x * 2, *rest, **named)

    compiled = torch.compile(step, fullgraph=True, **options)
    for rows in (3, 5, 8):
        args = call.args(rows, backend=backend)
        with on(backend):
            actual, expected = (gradients(*call.on_leaves(run, args)) for run in (compiled, step))
        torch.testing.assert_close(actual, expected)


def as_module(call: Call) -> Calls:
    def run(*args):
        positional, named = call.by_name(args)
        return call.function(*positional, **named)

    return Calls(run)


@each("call,backend", _traced)
def test_export_with_dynamic_shapes(call, backend):
    """The dimensions that grow with the rows are dynamic."""
    args, more = (call.args(rows, backend=backend) for rows in (4, 9))
    rows = torch.export.Dim("rows", min=2)

    def shape(a, b):
        if not isinstance(a, torch.Tensor):
            return [None] * len(a) if isinstance(a, list) else None
        return {d: rows for d, n in enumerate(a.shape) if n != b.shape[d]}

    shapes = tuple(map(shape, args, more))
    with on(backend):
        program = torch.export.export(as_module(call), args, dynamic_shapes=(shapes,))
        torch.testing.assert_close(program.module()(*more), as_module(call)(*more))


@FUNCTIONS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_meta_tensors(call, dtype):
    """Shapes, strides and dtypes of outputs and gradients."""
    args = call.args(6, dtype=dtype)
    on_meta, real = (
        gradients(*call.on_leaves(call.function, placed(args, torch.device(where))))
        for where in ("meta", "cpu")
    )
    assert all(t.is_meta for t in on_meta.values()) and on_meta.keys() == real.keys()
    for key, t in real.items():
        assert (on_meta[key].shape, on_meta[key].dtype) == (t.shape, t.dtype), key
        assert on_meta[key].stride() == t.stride(), key


class Subclass(torch.Tensor):
    pass


@FUNCTIONS
def test_a_subclass_stays_itself(call):
    args = call.args(6)
    run, (x, *rest) = call.on_leaves(call.function, args)
    assert {type(o) for o in as_tuple(run(x.as_subclass(Subclass), *rest))} == {Subclass}


@each("call", lambda f: ((n, (call,)) for n, call in f.calls.items() if f.symbolic))
def test_torch_fx_records_the_operator(call):
    args, graph = call.args(6), torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = [torch.fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(args))]
    positional, named = call.by_name(tuple(proxies))
    graph.output(tracer.create_arg(call.function(*positional, **named)))
    traced = torch.fx.GraphModule({}, graph)
    torch.testing.assert_close(traced(*args), as_module(call)(*args))
