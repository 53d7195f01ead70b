"""Operators on a GPU: CUDA graphs, numbers of launches, streams, very large tensors."""

import pytest
import torch
from calling import Calls

import fusedops
from contract.cuda_graphs import capture, count_launches
from contract.family import BF16, as_tuple, each, on
from fusedops.functional import add_rms_norm, attention, rotary_embedding, swiglu
from fusedops.optim import AdamW
from fusedops.testing import backends


def _on_gpus(family):
    for name, call in family.on_gpus.items():
        for backend in backends(call.operator):
            if backend in ("cuda", "triton"):
                yield f"{name}-{backend}", (call, backend, family.launches)


def _captured(family):
    for name, call in (family.on_gpus | family.graphs).items():
        for backend in backends(call.operator):
            if backend in ("cuda", "triton"):
                yield f"{name}-{backend}", (call, backend)


ON_GPUS = each("call,backend,launches", _on_gpus)
CAPTURED = each("call,backend", _captured)


def step_of(call, backend):
    """A forward, a forward and backward, and the tensors of both."""
    run, leaves = call.on_leaves(call.function, call.args(dtype=BF16, backend=backend))
    leaves = [x.requires_grad_() for x in leaves]
    with torch.no_grad():
        cotangents = [torch.randn_like(o) for o in as_tuple(run(*leaves))]

    def step():
        outputs = as_tuple(run(*leaves))
        return *(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, cotangents)

    return lambda: run(*leaves), step, [*leaves, *cotangents]


@CAPTURED
def test_graph_replays_what_eager_gives(call, backend):
    with on(backend):
        _, step, tensors = step_of(call, backend)
        graph, captured = capture(step)
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_()
        graph.replay()
        expected = step()
    assert all(map(torch.equal, captured, expected))


@ON_GPUS
def test_a_direction_is_one_launch(call, backend, launches):
    with on(backend):
        forward, step, _ = step_of(call, backend)
        step()
        with torch.no_grad():
            assert count_launches(forward) == 1
        assert launches is None or count_launches(step) == launches


@CAPTURED
def test_runs_on_the_current_stream(call, backend):
    """On another stream the kernels would read the first leaf before it is written."""
    with on(backend):
        _, step, (first, *_) = step_of(call, backend)
        late = torch.randn_like(first)
        with torch.no_grad():
            first.copy_(late)
        expected = step()
        with torch.no_grad():
            first.zero_()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # cycles, tens of milliseconds
            with torch.no_grad():
                first.copy_(late)
            actual = step()
        side.synchronize()
    assert all(map(torch.equal, actual, expected))


def rotated(q, k):
    """Every position by the same angles."""
    angle = torch.linspace(0, 3, q.shape[-1], device=q.device, dtype=q.dtype)[None, None]
    return rotary_embedding(q[None, None], k[None, None], angle.cos(), angle.sin())


# Functions of two tensors of rows, and the rows' width.
LARGE = {
    "add_rms_norm": (add_rms_norm, 8192),
    "add_rms_norm of short rows": (add_rms_norm, 64),
    "swiglu": (swiglu, 8192),
    "rotary_embedding": (rotated, 128),
}


@pytest.mark.xdist_group("large")  # one at a time
@pytest.mark.parametrize("name", LARGE)
def test_more_elements_than_int32_counts(name):
    """Rows are independent, so the last ones alone give the same bits."""
    function, width = LARGE[name]
    shape = (2**31 // width + 3, width)
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 12 * 2 * 2**31:
        pytest.skip("needs 48 GiB of free GPU memory")
    tensors = [torch.randn(shape, dtype=BF16, device="cuda") for _ in range(2)]

    def last_rows(rows):
        leaves = [t[rows].detach().requires_grad_() for t in tensors]
        outputs = as_tuple(function(*leaves))
        grads = torch.autograd.grad(outputs, leaves, [o.detach() for o in outputs])
        return [t.detach().view(-1, width)[-7:].clone() for t in (*outputs, *grads)]

    for backend in backends(name.split()[0]):
        if backend in ("cuda", "triton"):
            with on(backend):
                assert all(map(torch.equal, last_rows(slice(None)), last_rows(slice(-7, None))))


def test_a_capture_asks_for_warm_and_then_works():
    """37 columns, which no other test has: their kernels are compiled nowhere else."""
    q, k, v = (torch.randn(1, 2, 20, 37, device="cuda", dtype=BF16) for _ in range(3))
    model = Calls(lambda q, k, v: attention(q, k, v, causal=True), on_gpu=torch.nn.Linear(1, 1))
    model.cuda()

    def captured():
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            return graph, model(q, k, v)

    with pytest.raises(RuntimeError, match=r"forward_kernel is not compiled.*fusedops\.warm\("):
        captured()
    torch.cuda.synchronize()
    with torch.no_grad():
        assert "fusedops.triton.attention.forward.forward_kernel" in fusedops.warm(model, (q, k, v))
        assert fusedops.warm(model, (q, k, v)) == []
        graph, out = captured()
        q.normal_()
        graph.replay()
        assert torch.equal(out, model(q, k, v))


@pytest.mark.parametrize("limit", [None, 1.0])
def test_graph_step_trains_as_eager_steps(limit):
    def made():
        torch.manual_seed(0)
        model = fusedops.nn.RMSNorm(64, device="cuda")
        optimizer = AdamW(model.parameters(), lr=0.1, capturable=True, max_grad_norm=limit)

        def step(x, y):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, step

    batches = torch.randn(5, 2, 8, 64, device="cuda").unbind()
    (model, step), (eager, eager_step) = made(), made()
    replayed = fusedops.graph_step(step, *batches[0])
    for _ in range(3):
        eager_step(*batches[0])
    for x, y in batches[1:]:
        assert torch.equal(replayed(x, y), eager_step(x, y))
    assert torch.equal(model.weight, eager.weight)
    model.weight.data = model.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"graph_step: memory .* \(float32 \[64\]\)"):
        replayed(*batches[0])
