"""AdamW with offloaded states trains as it does without offloading."""

import copy
import math

import pytest
import torch
from axes import grid
from torch import nn

from adamw.offload import CPU, DTYPES, make_place
from adamw.training import (
    FORMATS,
    assert_close,
    equal_states,
    gradients,
    parameters,
    params_of,
    train,
)
from fusedops.optim import AdamW, AdamW8bit
from fusedops.optim.adamw import offload
from fusedops.optim.adamw.offload import Offloaded

LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "rows with gaps": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
}


OPTIONS = [
    {},
    {"amsgrad": True, "maximize": True},
    {"stochastic_rounding": False},
    {"master_weights": "remainder"},
    {"seed": 5, "weight_decay": 0.3, "betas": (0.8, 0.99)},
]


@grid(options=OPTIONS, state_dtype=FORMATS, dtype=DTYPES)
def test_as_without(place, dtype, state_dtype, options):
    options = options | {"state_dtype": state_dtype}
    place.train_both(*place.pair(lambda: parameters(dtype), **options))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_order_of_what_is_queued(monkeypatch, seed):
    """Gradients and weights are written, read and overwritten on the current stream, as late as it
    may: a step sees what was queued before it, and nothing of what is queued behind it."""
    place = make_place("late", monkeypatch, seed)
    ours, baseline = place.adamw(parameters(), state_dtype="int8"), AdamW8bit(parameters())
    params = params_of(ours)
    seen = []
    for i in range(1, 4):
        gradients(params_of(baseline), i)
        with place.streams.stream(place.streams.current):
            for p, q in zip(params, params_of(baseline), strict=True):
                p.grad = torch.full_like(p, math.nan) if p.grad is None else p.grad
                p.grad.copy_(q.grad.clone())
        for optimizer in (ours, baseline):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**i), torch.tensor(0.0)
            optimizer.step()
        with place.streams.stream(place.streams.current):
            for p, q in zip(params, params_of(baseline), strict=True):
                seen.append((torch.empty_like(p), q.detach().clone()))
                seen[-1][0].copy_(p)
                p.grad.copy_(torch.full_like(p, math.nan))
                with torch.no_grad():
                    q.mul_(0.9)
                    p.copy_(q.detach().clone())
    place.finish()
    assert all(torch.equal(copy, value) for copy, value in seen)
    place.assert_same(ours, baseline)


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_other_streams(monkeypatch, seed):
    """Two independent streams each step their own parameters."""
    place = make_place("late", monkeypatch, seed)
    ours, baseline = place.pair()
    currents = [place.streams.Stream() for _ in range(2)]
    for i in range(6):
        place.streams.current = currents[i % 2]
        for optimizer in (ours, baseline):
            place.gradients(params_of(optimizer), i)
            for p in params_of(optimizer)[1 - i % 2 :: 2]:
                p.grad = None
            optimizer.step()
    place.finish()
    place.assert_same(ours, baseline)


class TestParameters:
    @grid(layout=LAYOUTS, state_dtype=FORMATS)
    def test_strides(self, place, state_dtype, layout):
        """The first parameter is contiguous, and its gradient is not."""

        def make(put):
            params = put(parameters(torch.bfloat16, [(90, 70)] * 3))
            views = [LAYOUTS[layout](p.detach()).requires_grad_() for p in params[1:]]
            return [params[0], *views]

        ours = AdamW(make(place.put), offload="cpu", state_dtype=state_dtype)
        baseline = AdamW(make(list), state_dtype=state_dtype)
        assert not params_of(ours)[1].is_contiguous()
        for i in range(3):
            for optimizer in (ours, baseline):
                place.gradients(params_of(optimizer), i)
                p = params_of(optimizer)[0]
                p.grad = LAYOUTS[layout](p.grad)
                optimizer.step()
            place.finish()
        place.assert_same(ours, baseline)

    def test_gradients_that_come_and_go(self, place):
        shapes = [(300,), (5000,), (20,), (40, 90), (7,)]
        ours, baseline = place.pair(lambda: parameters(shapes=shapes))
        for i in range(8):
            for optimizer in (ours, baseline):
                params = params_of(optimizer)
                place.gradients(params, i)
                for k, p in enumerate(params):
                    if (i + k) % 3 == 0 or i == 6:
                        p.grad = None
                optimizer.step()
            place.finish()
        place.assert_same(ours, baseline)
        assert {ours.state[p]["step"].item() for p in params_of(ours)} == {4, 5}

    @pytest.mark.parametrize("change", ["copied", "through data", "replaced", "a state dict"])
    def test_weights_that_are_written_between_steps(self, place, change):
        """Only some of the writes change the version counter."""

        def write(optimizer):
            for i, p in enumerate(params_of(optimizer)):
                new = torch.full(p.shape, 0.5 + i).to(p)
                if change == "copied":
                    with torch.no_grad():
                        p.copy_(new)
                elif change == "through data":
                    p.data.copy_(new)
                elif change == "replaced":
                    p.data = new
                else:
                    module = nn.ParameterDict({"p": p})
                    module.load_state_dict({"p": new})

        ours, baseline = place.pair()
        for i in range(3):
            place.train(ours, 2, i), train(baseline, 2, i)
            write(ours), write(baseline)
        place.train(ours, 1), train(baseline, 1)
        place.assert_same(ours, baseline)

    def test_the_version_counts_up(self, place):
        p = place.put([torch.ones(10)])[0]
        product = p * p
        p.grad = torch.ones_like(p)
        AdamW([p], offload="cpu").step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    def test_chunks_are_alike(self, place):
        """No chunk of 1.2 MB of parameters is over the chunk size or under half of it."""
        ours = place.adamw(parameters(shapes=[(100000,), (33, 7), (40, 1000), (300, 30)]))
        place.train(ours, 1)
        (_, bucket), *_ = ours._plan.buckets
        sizes = [sum(piece.nbytes for piece in chunk.pieces) for chunk in bucket.chunks]
        slices = [piece.part for chunk in bucket.chunks for piece in chunk.pieces]
        assert max(sizes) <= 2 * 40 * 1000 * 4 and len(sizes) > 100
        assert sum(s * 2 < offload.CHUNK for s in sizes) <= 3
        assert all(s is ... or s.start % 32 == 0 for s in slices)


class TestOptions:
    def test_that_change_between_steps(self, place):
        ours, baseline = place.pair()
        for optimizer in (ours, baseline):
            place.train(optimizer, 2)
            optimizer.param_groups[0] |= {"lr": 0.3, "weight_decay": 0.4, "eps": 1e-3}
            place.train(optimizer, 2, 3)
            optimizer.param_groups[0] |= {"maximize": True, "amsgrad": True}
            place.train(optimizer, 2, 5)
        place.assert_same(ours, baseline)

    def test_a_learning_rate_on_the_device(self, place):
        ours = place.adamw(parameters(), lr=torch.tensor(1e-2, device=place.at))
        baseline = AdamW(parameters(), lr=torch.tensor(1e-2))
        for optimizer in (ours, baseline):
            place.train(optimizer, 2)
            optimizer.param_groups[0]["lr"].fill_(3e-3)
            place.train(optimizer, 2, 3)
        place.assert_same(ours, baseline)

    def test_offloading_that_is_switched(self, place):
        """The state moves to the right device."""
        ours, baseline = place.pair()
        for i, where in enumerate(["cpu", None, "cpu"]):
            ours.param_groups[0]["offload"] = where
            params, others = place.train(ours, 1, i), train(baseline, 1, i)
            (_, bucket), *_ = ours._plan.buckets
            assert isinstance(bucket, Offloaded) == (where == "cpu")
            device = ours.state[params[0]]["exp_avg"].device
            assert device == (params[0].device if where is None else CPU)
        assert_close([p.cpu() for p in params], others)

    @pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
    def test_nothing_changes_on_a_cpu(self, kind):
        ours, baseline = kind(parameters(), offload="cpu"), kind(parameters())
        train(ours), train(baseline)
        assert not any(isinstance(bucket, Offloaded) for _, bucket in ours._plan.buckets)
        equal_states(ours, baseline)

    def test_a_cuda_graph_is_refused(self, place, monkeypatch):
        ours = place.adamw(parameters())
        stepped = place.adamw(parameters())
        place.train(stepped)
        monkeypatch.setattr(offload, "capturing", lambda _: True)
        monkeypatch.setattr("fusedops.optim.adamw.plan.capturing", lambda _: True)
        for optimizer in (ours, stepped):
            place.gradients(params_of(optimizer), 1)
            with pytest.raises(
                RuntimeError,
                match=r"AdamW: offload must be None while a CUDA graph is captured.* got 'cpu'",
            ):
                optimizer.step()


class TestScaling:
    @grid(max_norm=[0.5, 1e9], dtype=DTYPES)
    def test_clipping(self, place, dtype, max_norm):
        ours, baseline = place.pair(lambda: parameters(dtype), max_grad_norm=max_norm)
        place.train(ours), train(baseline)
        if place.name != "cuda" or max_norm > 1e6:
            return place.assert_same(ours, baseline)
        # the norm is a GPU's sum
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        assert_close([p.cpu() for p in params_of(ours)], params_of(baseline), atol=tolerance)

    def test_a_norm_that_is_not_finite_skips_the_step(self, place):
        ours = place.adamw(parameters(), max_grad_norm=1.0)
        place.train(ours, 2)
        before = [p.detach().clone() for p in params_of(ours)]
        states = copy.deepcopy(ours.state_dict()["state"])
        place.gradients(params_of(ours), 3)
        params_of(ours)[0].grad[4321] = math.inf
        ours.step()
        place.finish()
        assert all(map(torch.equal, params_of(ours), before))
        for i, state in ours.state_dict()["state"].items():
            assert all(torch.equal(state[k], states[i][k]) for k in state)

    @pytest.mark.parametrize("max_norm", [None, 1e9])
    def test_grad_scale_and_found_inf(self, place, max_norm):
        """GradScaler's tensors are on the device."""

        def make(optimizer, at):
            for i in range(5):
                place.gradients(params_of(optimizer), i)
                optimizer.grad_scale = torch.tensor(64.0, device=at)
                optimizer.found_inf = torch.tensor(float(i == 2), device=at)
                optimizer.step()
                place.finish()
            return optimizer

        baseline = make(AdamW(parameters(), max_grad_norm=max_norm), CPU)
        ours = make(place.adamw(parameters(), max_grad_norm=max_norm), place.at)
        place.assert_same(ours, baseline)
        assert {ours.state[p]["step"].item() for p in params_of(ours)} == {4}
