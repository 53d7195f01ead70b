"""AdamW's codes, thresholds, random numbers and errors, which do not differ by backend."""

from dataclasses import replace

import pytest
import torch

from adamw.cases import step_of
from fusedops.references.adamw import BLOCK, Random, adamw_key, decoded, encoded, stochastic


def test_codes_come_back():
    """Encoding decoded values to the nearest codes gives the same codes."""
    m = torch.arange(-127, 129).clamp(max=127).to(torch.int8)
    v = torch.arange(256).to(torch.uint8)
    scales = torch.tensor([3.0]), torch.tensor([0.7])
    codes = encoded(*decoded(m, v, *scales))
    torch.testing.assert_close(codes, (m, v, *scales), rtol=1e-6, atol=0)


def test_chance_is_fair():
    t = torch.full((100 * BLOCK,), 1 + 0.3 * 2**-7)
    for dtype, unit in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        t = torch.full((100 * BLOCK,), 1 + 0.3 * unit)
        up = stochastic(t, Random(3, t.numel()).halves(64), dtype) > 1
        assert abs(up.float().mean() - 0.3) < 0.01


def test_codes_are_right_on_average():
    """Over 256 steps, each element's codes stand for its moments: m, and the root of sqrt(v)."""
    code = torch.linspace(0.05, 126.5, BLOCK)
    m, v = code**2 * torch.tensor([1.0, -1.0]).repeat(BLOCK // 2), (code / 256) ** 4
    m[0], v[0] = 127**2, 1
    mean_m, mean_root, drawn = torch.zeros(BLOCK), torch.zeros(BLOCK), Random(0, BLOCK)
    for step in range(256):
        codes = encoded(m, v, replace(drawn, step=step).thresholds())
        wide_m, wide_v = decoded(*codes)
        mean_m += wide_m / 256
        mean_root += wide_v**0.25 / 256
    # 1 / 6 is right on average over the fractional parts; 256 thresholds are not quite even
    assert ((mean_m - m).abs() <= 1 / 6 + 0.025 * code).all()
    assert (mean_root - v**0.25)[code > 1].abs().max() < 0.01 / 256


@pytest.mark.parametrize("steps", [8, 21, 64])
def test_thresholds_are_spread_evenly(steps):
    """Among any few steps, an element meets thresholds no further apart than twice the mean."""
    at = [Random(0, 2 * BLOCK, step=step).thresholds() for step in range(100, 100 + steps)]
    assert at[0].shape == (2, BLOCK)
    for element in torch.stack(at).flatten(1).T.double():
        edges = element.sort().values
        gaps = torch.cat([edges.diff(), edges[:1] + 65536 - edges[-1:]])
        assert gaps.max() <= 2 * 65536 / steps


def test_random_numbers_of_neighbours_are_unlike():
    keys = [adamw_key(seed, step, index) for seed in (0, 1) for step in (1, 2) for index in (0, 1)]
    drawn = [Random(key, 10 * BLOCK).halves(64).float() for key in keys]
    table = torch.corrcoef(torch.stack(drawn))
    assert (table - torch.eye(len(keys))).abs().max() < 0.1
    assert all(abs(d.mean() - 32767.5) < 1280 for d in drawn)


def test_stochastic_float16_is_a_neighbour():
    t = torch.cat([torch.randn(5000) * 10.0**e for e in range(-8, 5)])
    random = Random(1, t.numel()).halves(64)
    rounded = stochastic(t, random, torch.float16).double()
    nearest = t.half()
    down, up = (torch.nextafter(nearest, torch.tensor(x, dtype=torch.half)) for x in (-1e5, 1e5))
    inside = (rounded >= down.double()) & (rounded <= up.double())
    assert inside.all()
    exact = t.double() == nearest.double()
    assert torch.equal(rounded[exact], t.double()[exact])


def test_errors_name_the_argument():
    step = step_of([(300,)], moments="int8")

    def message(**changed):
        arguments = vars(step.copy()) | changed
        more = arguments.pop("more")
        with pytest.raises(RuntimeError) as error:
            torch.ops.fusedops.adamw_step(*arguments.values(), **more)
        return str(error.value)

    wrong = {
        "grads": [torch.zeros(301)],
        "exp_avgs": [torch.zeros(300, dtype=torch.int16)],
        "exp_avg_sqs": [torch.zeros(300)],
        "steps": [torch.tensor(1)],
        "scales": [torch.zeros(2)],
        "params": [torch.zeros(300, dtype=torch.float64)],
        "kinds": [1, 0, 0, 0, 0],
        "options": [0.1],
        "remainders": [torch.zeros(300, dtype=torch.int16)],
    }
    for name, value in wrong.items():
        assert f"adamw_step: {name} must" in message(**{name: value})
    assert "kinds must name a rounding" in message(kinds=[0, 2, 0, 0, 0])
