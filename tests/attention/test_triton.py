"""Launch settings of Triton's attention kernels: tile sizes, registers, head order, key splits."""

import pytest
import torch
from axes import grid
from contract.interpreter import interpreted

from attention.cases import heads

pytest.importorskip("triton")

import fusedops
from fusedops.functional import attention
from fusedops.patching.core.thresholds import WIDEST_ON_TENSOR_CORES
from fusedops.references.attention import attention_reference
from fusedops.triton.attention import call, forward
from fusedops.triton.attention.decode import LEAST_SPLIT, MOST_PARTS, split

TILES = {"forward": call.FORWARD, "queries": call.QUERIES, "keys": call.KEYS}
NAMES = ("M", "N", "num_warps", "num_stages")


def a_call(width, dtype, rich, q_width=None):
    q, k, v = (torch.empty(1, 2, 8, w, dtype=dtype) for w in (q_width or width, width, width))
    bias = torch.empty(1, 1, 8, 8, dtype=dtype) if rich else None
    options = (0.125, 0.0, 0.0)
    return call.AttentionLaunch.of(q, k, v, bias, None, None, None, None, options, (-1, -1), False)


def chosen(name, arch, a, monkeypatch):
    monkeypatch.setattr(call, "INTERPRETING", False)
    monkeypatch.setattr(call, "architecture", lambda device: arch)
    tile = call.chosen(a, TILES[name])
    return tuple(tile[key] for key in NAMES), tile["maxnreg"]


@grid(name=TILES, arch=[80, 86, 90, 100, 120])
def test_by_architecture_and_call(name, arch, monkeypatch):
    """sm_90 has its own tiles for 16-bit calls of some widths."""
    tiles = TILES[name]
    for width in (64, 128, 256, 512):
        for dtype in (torch.bfloat16, torch.float16):
            plain = chosen(name, arch, a_call(width, dtype, False), monkeypatch)
            on_hopper = arch == 90 and width in tiles.hopper
            assert plain == ((tiles.hopper if on_hopper else tiles.plain)[width], 255)
            rich = chosen(name, arch, a_call(width, dtype, True), monkeypatch)
            on_hopper = arch == 90 and width in tiles.hopper_rich
            assert rich == ((tiles.hopper_rich if on_hopper else tiles.rich)[width], 255)
        wide = next(w for w in tiles.float32 if width <= w)
        for rich in (False, True):
            tile, registers = chosen(name, arch, a_call(width, torch.float32, rich), monkeypatch)
            assert (*tile, registers)[: len(tiles.float32[wide])] == tiles.float32[wide]
    assert set(tiles.hopper) <= set(tiles.plain)
    assert set(tiles.hopper_rich) <= set(tiles.rich)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("q_width,width,padded", [(1, 1, 64), (65, 65, 128), (64, 80, 128)])
def test_by_the_wider_of_the_padded_widths(name, q_width, width, padded, monkeypatch):
    a = a_call(width, torch.bfloat16, False, q_width)
    assert chosen(name, 80, a, monkeypatch) == (TILES[name].plain[padded], 255)


@grid("keys,kv_heads,window,expected", [
    (4096, 32, (-1, 0), 64), (4096, 4, (-1, 0), 16), (16384, 32, (-1, 0), 16),
    (10**6, 32, (-1, 0), 4), (4096, 32, (-1, -1), 1), (0, 4, (-1, 0), 16),
])  # fmt: skip
def test_heads_whose_keys_the_l2_cache_holds_run_together(keys, kv_heads, window, expected):
    """Four heads share k and v of 2 MiB; an H200's cache has 50 MiB."""
    q, k = (
        torch.empty(128, dtype=torch.bfloat16).expand(1, n, keys, -1)
        for n in (4 * kv_heads, kv_heads)
    )
    a = call.AttentionLaunch.of(q, k, k, *[None] * 5, (0.125, 0.0, 0.0), window, True)
    assert call.heads_together(a) == expected


@pytest.mark.skipif(not interpreted("triton"), reason="runs in the interpreter")
@pytest.mark.parametrize("together", [1, 3, 4, 100])
def test_each_block_of_each_head_runs_once(together, monkeypatch):
    """Whatever their order; the last group of heads may be smaller."""
    monkeypatch.setattr(forward, "heads_together", lambda a: together)
    q, k, v = heads(2, 2, 1, 130, 130, 16)
    with fusedops.backend("triton"):
        out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-5, check_dtype=False)


def test_a_block_has_the_registers_that_it_may_use():
    """A multiprocessor has 65536 registers; a launch with more fails."""
    for tiles in TILES.values():
        for table in tiles:
            for _, _, warps, _, *registers in table.values():
                max_registers = (registers or [255])[0]
                assert max_registers is None or (max_registers + 1) * 32 * warps <= 65536


@grid(width=[16, 64, 96, 128, 129, 192, 256, 512])
def test_which_rich_calls_fill_sm_90s_matmuls(width, monkeypatch):
    """They need 64 rows; `patch` leaves the other calls to torch."""
    (rows, *_), _ = chosen("forward", 90, a_call(width, torch.bfloat16, True), monkeypatch)
    assert (rows >= 64) == (width <= WIDEST_ON_TENSOR_CORES)


@pytest.mark.parametrize(
    ("programs", "keys", "parts"),
    [
        (8, LEAST_SPLIT - 1, 1),  # a second launch would not pay
        (8, 1024, 32),
        (8, 1000, 32),  # the last tile is not whole
        (8, 4096, 33),  # two programs per multiprocessor
        (300, 4096, 1),
        (1, 10**6, MOST_PARTS),
    ],
)
def test_parts_of_the_keys(programs, keys, parts):
    assert split(programs, keys, multiprocessors=132) == parts
