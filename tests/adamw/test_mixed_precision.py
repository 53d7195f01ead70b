"""AdamW steps correctly in mixed precision: 16-bit parameters, clipping, GradScaler."""

import math

import pytest
import torch
from axes import grid
from torch import nn

import fusedops
from adamw.training import SHAPES, assert_close, gradients, parameters, params_of, train
from fusedops.optim import AdamW
from fusedops.references.adamw import with_remainder


class TestSixteenBits:
    def test_stochastic_rounding_moves_what_nearest_does_not(self):
        def after(**options):
            p = torch.ones(4096, dtype=torch.bfloat16).requires_grad_()
            optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, **options)
            for _ in range(100):
                p.grad = torch.ones_like(p)
                optimizer.step()
            return p.float().mean().item()

        assert after(stochastic_rounding=False) == 1
        assert after() == pytest.approx(0.99, abs=3e-4)

    def test_a_remainder_is_float32_training(self):
        def make(dtype, **options):
            p = torch.linspace(-2, 2, 6000).bfloat16().to(dtype).requires_grad_()
            optimizer = AdamW([p], lr=1e-3, **options)
            for i in range(20):
                draw = torch.Generator().manual_seed(i)
                p.grad = torch.randn(6000, generator=draw).bfloat16().to(dtype)
                optimizer.step()
            return p, optimizer.state[p]

        wide, _ = make(torch.float32)
        narrow, state = make(torch.bfloat16, master_weights="remainder")
        assert torch.equal(with_remainder(narrow, state["remainder"]), wide)

    def test_seeds_differ(self):
        params, other = (train(AdamW(parameters(torch.bfloat16), seed=s)) for s in (1, 2))
        assert not torch.equal(params[0], other[0])


class TestClipping:
    @pytest.mark.parametrize("max_norm", [0.5, 1e9])
    def test_within_the_step(self, max_norm):
        ours = AdamW(parameters(), max_grad_norm=max_norm)
        theirs = torch.optim.AdamW(parameters())
        for i in range(4):
            for optimizer in (ours, theirs):
                gradients(params_of(optimizer), i)
            nn.utils.clip_grad_norm_(params_of(theirs), max_norm)
            kept = [p.grad.clone() for p in params_of(ours)]
            ours.step()
            theirs.step()
            assert all(map(torch.equal, kept, (p.grad for p in params_of(ours))))
        assert_close(params_of(ours), params_of(theirs))

    @grid(dtype=[torch.float32, torch.bfloat16, torch.float64], norm_type=[2.0, 1.0, math.inf])
    def test_alone(self, dtype, norm_type):
        shapes = [s for s in SHAPES if s != (0,)]  # which has no largest element
        ours, theirs = parameters(dtype, shapes), parameters(dtype, shapes)
        for params in (ours, theirs):
            gradients(params, 1)
            params[1].grad = params[1].grad.t().contiguous().t()
        norm = fusedops.clip_grad_norm_(ours, 0.7, norm_type)
        torch_norm = nn.utils.clip_grad_norm_(theirs, 0.7, norm_type)
        torch.testing.assert_close(norm, torch_norm, check_dtype=False, rtol=1e-2, atol=0)
        assert_close([p.grad for p in ours], [p.grad for p in theirs], rtol=2e-2)

    @pytest.mark.parametrize("bit", ["negative", "conjugate"])
    def test_gradients_whose_numbers_are_not_those_in_memory(self, bit):
        draw = torch.Generator().manual_seed(0)
        whole = torch.randn(500, dtype=torch.complex64, generator=draw).conj()
        grad = whole.imag if bit == "negative" else whole
        assert grad.is_neg() or grad.is_conj()
        p, q = (torch.zeros_like(grad).requires_grad_() for _ in range(2))
        p.grad, q.grad = grad, grad.resolve_neg().resolve_conj()
        norms = fusedops.clip_grad_norm_([p], 0.7), nn.utils.clip_grad_norm_([q], 0.7)
        torch.testing.assert_close(*norms)
        torch.testing.assert_close(p.grad, q.grad)

    def test_not_finite(self):
        p = parameters(shapes=[(10,)])[0]
        p.grad = torch.full((10,), math.nan)
        with pytest.raises(RuntimeError, match="non-finite"):
            fusedops.clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
        assert fusedops.clip_grad_norm_(p, 1.0).isnan()
        assert p.grad.isnan().all()

    def test_nothing_to_clip(self):
        assert fusedops.clip_grad_norm_([], 1.0) == 0
        assert fusedops.clip_grad_norm_(parameters(), 1.0) == 0
        assert fusedops.clip_grad_norm_(iter(parameters()), 1.0) == 0


class TestGradScaler:
    def test_unscales_and_skips_in_the_step(self):
        def make(kind, **options):
            p = parameters(shapes=[(5000,)])[0]
            optimizer, scaler = kind([p], **options), torch.amp.GradScaler("cpu", init_scale=128.0)
            for i in range(6):
                optimizer.zero_grad()
                bad = math.inf if i == 3 else 1.0
                scaler.scale((p * torch.arange(5000) * bad).sum()).backward()
                if i == 4:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            return p, scaler.get_scale(), optimizer.state[p]["step"].item()

        (ours, scale, steps) = make(AdamW)
        (theirs, wanted_scale, wanted_steps) = make(torch.optim.AdamW)
        assert_close([ours], [theirs])
        assert (scale, steps) == (wanted_scale, wanted_steps) == (64.0, 5)

    def test_what_has_no_kernel_is_unscaled_too(self):
        def make(kind):
            params = parameters(shapes=[(50,)]) + parameters(torch.float64, shapes=[(20,)])
            optimizer, scaler = kind(params), torch.amp.GradScaler("cpu", init_scale=128.0)
            for i in range(4):
                optimizer.zero_grad()
                bad = math.inf if i == 2 else 1.0
                scaler.scale(sum((p * p).sum() for p in params) * bad).backward()
                scaler.step(optimizer)
                scaler.update()
            return params

        assert_close(make(AdamW), make(torch.optim.AdamW))
