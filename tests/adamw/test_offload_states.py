"""Tests of AdamW's offloaded states: their device, state dicts, and shards of DTensors."""

import copy

import pytest
import torch
from axes import grid
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from adamw.offload import CPU, DTYPES, assert_offloaded, make_place
from adamw.training import (
    FORMATS,
    assert_close,
    parameters,
    params_of,
    train,
)
from fusedops.optim import AdamW, AdamW8bit


class TestStates:
    @pytest.mark.parametrize("state_dtype", FORMATS)
    def test_lie_on_the_host(self, place, state_dtype):
        options = {"state_dtype": state_dtype, "amsgrad": True, "master_weights": "remainder"}
        ours = place.adamw(parameters(torch.bfloat16), **options)
        for p in place.train(ours, 1):
            for value in ours.state[p].values():
                assert value.device == CPU and value.is_contiguous()
                assert place.name != "cuda" or value.is_pinned()

    @grid(state_dtype=FORMATS, dtype=DTYPES)
    def test_go_to_an_optimizer_without_and_back(self, place, dtype, state_dtype):
        options = {"state_dtype": state_dtype, "amsgrad": True}
        baseline = AdamW(parameters(dtype), **options)
        train(baseline, 6)
        ours = place.adamw(parameters(dtype), **options)
        place.train(ours, 2)
        without = AdamW([p.detach().cpu().requires_grad_() for p in params_of(ours)], **options)
        without.load_state_dict(copy.deepcopy(ours.state_dict()))
        train(without, 2, 3)
        later = place.adamw(params_of(without), **options)
        later.load_state_dict(copy.deepcopy(without.state_dict()))
        assert all(state["exp_avg"].device == CPU for state in later.state.values())
        place.train(later, 2, 5)
        place.assert_same(later, baseline)

    def test_of_torch_both_ways(self, place):
        theirs = torch.optim.AdamW(place.put(parameters()))
        baseline = torch.optim.AdamW(parameters())
        train(baseline, 6)
        place.train(theirs, 2)
        ours = place.adamw(params_of(theirs))
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        place.train(ours, 2, 3)
        assert_offloaded(ours)
        for states in (ours.state_dict(), ours.torch_state_dict()):
            later = torch.optim.AdamW(place.put([p.detach().clone() for p in params_of(ours)]))
            later.load_state_dict(copy.deepcopy(states))
            assert_close([p.cpu() for p in place.train(later, 2, 5)], params_of(baseline))

    def test_that_are_replaced_are_seen(self, place):
        ours, baseline = place.pair()
        for optimizer in (ours, baseline):
            p, q, *_ = place.train(optimizer, 2)
            optimizer.state[p]["exp_avg"] = torch.zeros_like(p).detach()  # on the device
            optimizer.state[q] = {}
            place.train(optimizer, 2, 3)
        place.assert_same(ours, baseline)

    def test_a_copy_of_the_optimizer(self, place):
        ours, baseline = place.pair(kind=AdamW8bit)
        place.train(ours, 2), train(baseline, 4)
        later = copy.deepcopy(ours)
        place.train(later, 2, 3)
        place.assert_same(later, baseline)

    def test_an_option_that_the_kernels_do_not_take(self, place):
        """With torch's own code the state is on the parameter's device."""
        ours, theirs = place.adamw(parameters()), torch.optim.AdamW(parameters())
        for i, differentiable in enumerate([False, True, False]):
            ours.param_groups[0]["differentiable"] = differentiable
            params, others = place.train(ours, 1, i), train(theirs, 1, i)
            device = ours.state[params[0]]["exp_avg"].device
            assert device == (params[0].device if differentiable else CPU)
        assert_close([p.cpu() for p in params], others)
        ours.defaults["differentiable"] = True  # so that gradients are recorded around a step
        assert_close([p.cpu() for p in place.train(ours, 1, 3)], train(theirs, 1, 3))


class TestShards:
    """DTensors of the second of two ranks, whose other does not exist."""

    @pytest.fixture(autouse=True)
    def ranks(self):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        yield
        torch.distributed.destroy_process_group()

    def shards(self, device, mesh=None, dtype=torch.bfloat16):
        mesh = mesh or torch.distributed.device_mesh.init_device_mesh(device.type, (2,))
        return [
            nn.Parameter(self.sharded(p.detach()[p.shape[0] // 2 :].to(device), mesh))
            for p in parameters(dtype, [(100, 300), (80, 64), (40, 3)])
        ]

    def sharded(self, part, mesh):
        """Made as fully_shard makes it: the part may lie on the CPU where the mesh is a GPU's."""
        shape = torch.Size((2 * part.shape[0], part.shape[1]))
        meta = TensorMeta(shape, part.stride(), part.dtype)
        return DTensor(part, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)

    def train(self, optimizer, finish=lambda: None, steps=3):
        for i in range(steps):
            draw = torch.Generator().manual_seed(i)
            for p in params_of(optimizer):
                part = p.to_local().detach()
                grad = torch.randn(part.shape, generator=draw).to(part)
                p.grad = self.sharded(grad, p.device_mesh)
            optimizer.step()
            finish()
        return params_of(optimizer)

    @pytest.mark.parametrize("state_dtype", FORMATS)
    def test_as_without(self, place, state_dtype):
        options = {"state_dtype": state_dtype, "max_grad_norm": 1e9}
        ours = AdamW(self.shards(place.at), offload="cpu", **options)
        baseline = AdamW(self.shards(CPU), **options)
        params, others = self.train(ours, place.finish), self.train(baseline)
        assert_offloaded(ours)
        for p, q in zip(params, others, strict=True):
            assert torch.equal(p.to_local().cpu(), q.to_local())
            for name, value in baseline.state[q].items():
                state = ours.state[p][name]
                assert (type(state), state.shape) == (type(value), value.shape)
                assert state.device == CPU
                assert all(map(torch.equal, map(local, [state]), map(local, [value])))

    @pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
    def test_states_lie_on_the_host_though_their_mesh_is_of_gpus(self, monkeypatch, state_dtype):
        place = make_place("at once", monkeypatch)
        mesh = torch.distributed.DeviceMesh("cuda", [0, 1])
        ours = AdamW(self.shards(CPU, mesh), offload="cpu", state_dtype=state_dtype)
        baseline = AdamW(self.shards(CPU), state_dtype=state_dtype)
        params, others = self.train(ours, place.finish), self.train(baseline)
        assert_offloaded(ours)
        for p, q in zip(params, others, strict=True):
            assert torch.equal(p.to_local(), q.to_local())
            assert ours.state[p]["exp_avg"].device_mesh.device_type == "cuda"
        later = AdamW(self.shards(CPU, mesh), offload="cpu", state_dtype=state_dtype)
        later.load_state_dict(copy.deepcopy(ours.state_dict()))
        self.train(later, place.finish)


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t
