"""The model that predicts GPU kernels' speed: published kernels, fusedops' own, planted errors."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from checks.machine_code import nvcc
from checks.performance import cuda_loops, model, rows, sass_loops, table, triton_loops
from checks.performance.device import H200
from checks.performance.model import Launch, Loop
from checks.performance.published import BEYOND, KERNELS
from fusedops.triton.attention import decode
from fusedops.triton.attention.call import AHEAD as TILE_AHEAD
from fusedops.triton.attention.call import FORWARD, KEYS, LEAST_AHEAD, QUERIES

needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="nvcc is not installed")

# Causal attention's kernels as they were when the model was written, and the TFLOP/s estimated by
# hand from their code for 4096 tokens. They stay as they are: a new constant must fit them.
FIRST = triton_loops.from_json((Path(__file__).parent / "attention_loops.json").read_text())
READ = {"forward": (2, 345), "backward": (5, 93)}  # products, TFLOP/s
ROWS = {row.name: row for row in [*rows.TRITON_ROWS, *rows.CUDA_ROWS]}
TILE = Loop(instructions=3000, exponentials=8192, wgmma=2**22, waits=1, bytes=2**15)
CODE = """
 /*0000*/                   DEPBAR.LE SB0, 0x0 ;
 /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
 /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4].tnspB, R24 ;
 /*0030*/                   MUFU.EX2 R4, R5 ;
 /*0040*/              @!P0 BRA 0x0070 ;
 /*0050*/                   CALL.REL.NOINC 0x1000 ;
 /*0060*/                   BRA 0x0070 ;
 /*0070*/                   LDGSTS.E.BYPASS.128 [R9+0x8000], desc[UR32][R20.64], !P1 ;
 /*0080*/              @P1 BRA 0x0000 ;
"""


AHEAD = """
 /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
 /*0010*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
 /*0020*/              @!P0 BRA 0x0060 ;
 /*0030*/                   ISETP.GT.AND P0, PT, R8, R9, PT ;
 /*0040*/                   FSEL R10, R10, -INF , P0 ;
 /*0050*/                   FSEL R11, R11, -INF , P0 ;
 /*0060*/                   HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR4].tnspB, R56 ;
 /*0070*/              @P4 IMAD.MOV.U32 R0, RZ, RZ, 0x8000 ;
 /*0080*/              @P4 SYNCS.ARRIVE.TRANS64 RZ, [UR49+0x30000], R0 ;
 /*0090*/                   UTMALDG.2D [UR44], [UR60] ;
 /*00a0*/                   MUFU.EX2 R4, R5 ;
 /*00b0*/               @P1 BRA 0x0000 ;
 /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR45+0x30010], R251 ;
 /*00d0*/               @P4 BRA 0x0010 ;
"""


def off(predicted, known):
    return abs(predicted / known - 1)


def first(call, products, device):
    """Predicted TFLOP/s of the first kernels."""
    launches = [rows.causal(4096, one, device) for one in FIRST if one.call == call]
    return rows.causal_flop(4096, products) / model.seconds(launches, device) / 1e12


def misses(device):
    """The published figures and the readings that a device's constants do not reproduce."""
    published = [
        f"{kernel.name}, {length}"
        for kernel in KERNELS
        for length, known in kernel.pairs()
        if off(kernel.predicted(length, device), known) > 0.2
    ]
    read = [
        call
        for call, (products, known) in READ.items()
        if off(first(call, products, device), known) > 0.05
    ]
    return [*published, *read]


def test_published_forwards_within_a_fifth_and_readings_within_a_twentieth():
    assert not misses(H200)


@pytest.mark.parametrize(
    ("constant", "factor"),
    [
        ("multiprocessors", 0.5),
        ("clock", 1.1),
        ("wgmma", 1.2),
        ("mma", 1.5),
        ("issue", 1.25),
        ("schedulers", 0.5),
        ("special_functions", 0.5),
        ("overlap", 3),
        ("synchronisation", 4),
        ("l2", 0.9),
        ("l2_latency", 2),
        ("memory_latency", 4),
        ("launch", 100),
    ],
)
def test_a_planted_error_in_a_constant_is_noticed(constant, factor):
    wrong = getattr(H200, constant) * factor
    assert misses(replace(H200, **{constant: int(wrong) if wrong > 1 else wrong}))


def test_the_tiles_are_the_launchers():
    forward, query, *keys = (
        one for call in ("forward", "backward") for one in triton_loops.counted(call)
    )
    (short,) = triton_loops.counted("forward, few keys")
    assert (short.m, short.n) == FORWARD.hopper[128][:2]
    assert (forward.m, forward.n) == TILE_AHEAD[:2]
    assert (forward.descriptors, short.descriptors) == (2, 0)
    assert forward.together and short.together and not query.together
    assert forward.whole.ahead == forward.whole.wgmma / 2
    assert forward.whole.under > short.whole.under
    assert (query.m, query.n) == QUERIES.hopper[128][:2]
    assert {(one.m, one.n) for one in keys} == {KEYS.hopper[128][:2]}
    assert forward.whole.wgmma == 4 * forward.m * forward.n * 128  # two products
    assert query.whole.wgmma == 6 * query.m * query.n * 128
    assert forward.whole.bytes == 2 * forward.n * 128 * 2  # keys and values
    (key,) = keys  # one launch for both gradients
    assert key.whole.bytes == 2 * key.m * 128 * 2  # q and grad
    assert key.whole.wgmma == key.edge.wgmma == 8 * key.m * key.n * 128
    assert not any(loop.mma for one in (forward, query, key) for loop in one.loops)


@pytest.mark.parametrize(("call", "least"), [("forward", 480), ("backward", 330)])
def test_predicted_speed_of_attention(call, least):
    """TFLOP/s of 4096 causal tokens. A kernel that is predicted slower needs a reason."""
    assert ROWS[f"attention {call}, causal, 4096 tokens"].predicted() >= least


def test_key_blocks_and_query_blocks_count_every_visible_pair_once():
    for blocks, size, other in ((rows.query_blocks, 128, 64), (rows.key_blocks, 16, 128)):
        shape = {"m": 128, "n": 64} if size == 128 else {"m": 128, "n": 16}
        found = list(blocks(1024, replace(FIRST[0], **shape)))
        pairs = sum(whole + masked for whole, masked in found) * size * other
        assert 1024**2 / 2 < pairs <= 1024 * (1024 + size + other) / 2 + 1024 * 64


def test_a_tile_with_half_the_keys_is_slower():
    half = replace(TILE, instructions=1700, exponentials=4096, wgmma=2**21, bytes=2**14)
    assert 2 * model.clocks(half, H200.l2_latency) > model.clocks(TILE, H200.l2_latency)
    key = next(one for one in FIRST if one.kernel == "key_kernel")
    assert key.whole.intensity < 25 < 100 < TILE.intensity
    halved = replace(key, n=key.n // 2)  # each block has half of the keys and reads as much
    assert rows.causal(4096, halved, H200).l2 == pytest.approx(
        2 * rows.causal(4096, key, H200).l2, rel=0.01
    )


def test_each_cost_counts():
    base = model.clocks(TILE, 1e-6)
    assert model.clocks(TILE, 1e-6, overlapped=True) < base
    for more in ({"instructions": 6000}, {"exponentials": 2**16}, {"wgmma": 2**23}, {"waits": 2}):
        assert model.clocks(replace(TILE, **more), 1e-6) > base
    assert model.clocks(TILE, 2e-6) - base == pytest.approx(1e-6 * H200.clock)


def test_products_in_flight_hide_a_part_of_what_follows():
    half = replace(TILE, ahead=TILE.wgmma / 2)
    assert model.clocks(half, 0) == model.clocks(TILE, 0)  # nothing is issued meanwhile
    some, most, more = (replace(half, under=n) for n in (1000, 3000, 10**6))
    assert model.clocks(some, 0) > model.clocks(most, 0)
    saved = model.clocks(TILE, 0) - model.clocks(more, 0)
    assert saved == pytest.approx(H200.overlap * half.ahead / H200.wgmma)
    assert model.clocks(some, 0, overlapped=True) == model.clocks(TILE, 0, overlapped=True)


def test_the_order_of_blocks():
    """Without heads together, a head's blocks are followed by the next head's."""
    assert rows.in_order([3, 2, 1], 4, 1) == [3, 2, 1] * 4
    assert rows.in_order([3, 2, 1], 5, 2) == [3, 3, 2, 2, 1, 1] * 2 + [3, 2, 1]
    order = rows.in_order(list(range(40, 0, -1)), 32, 8)
    assert model.schedule(order, 1) < model.schedule(list(range(40, 0, -1)) * 32, 1)


def test_few_keys_take_the_other_loop():
    (one,) = triton_loops.counted("forward, few keys")
    few = rows.causal(1024, one, H200)
    assert rows.LENGTHS[0] < LEAST_AHEAD <= rows.LENGTHS[1]
    assert ROWS["attention forward, causal, 1024 tokens"].launches(H200) == [few]
    (long,) = triton_loops.counted("forward")
    assert model.seconds([few]) < model.seconds([rows.causal(1024, long, H200)])


@pytest.mark.parametrize("limit", ["L2", "memory", "instructions", "tensor cores", "blocks"])
def test_a_launch_takes_as_long_as_its_slowest_limit(limit):
    each = {
        "L2": {"l2": H200.l2},
        "memory": {"memory": H200.memory},
        "instructions": {"instructions": 132 * 4 * H200.clock * H200.issue},
        "tensor cores": {"flop": {"wgmma": 132 * H200.clock * H200.wgmma}},
        "blocks": {"programs": [H200.clock]},
    }
    launch = Launch(**each[limit])
    assert model.bound([launch]) == limit
    assert model.seconds([launch]) == pytest.approx(1 + H200.launch)
    assert model.seconds([launch, Launch()]) == pytest.approx(1 + 2 * H200.launch)


def test_blocks_fill_the_slots_in_order():
    two = replace(H200, multiprocessors=2)
    assert model.schedule([1, 1, 4], 1, two) == 5
    assert model.schedule([4, 1, 1], 1, two) == 4
    assert model.schedule([1, 1, 4], 2, two) == 4
    assert model.resident(255, 100_000, 8) == 1
    assert model.resident(128, 100_000, 8) == 2
    assert model.resident(32, 0, 4) == 16


def test_loops_are_counted_without_slow_paths(monkeypatch):
    monkeypatch.setattr(sass_loops, "LEAST", 5)
    (loop,) = sass_loops.loops(sass_loops.parsed(CODE))
    found = sass_loops.loop_of(loop, 4)
    assert found == Loop(
        instructions=7 * 4, exponentials=128, wgmma=2 * 64 * 64 * 16, waits=1, bytes=16 * 128
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("SB0, 0x0", "SB0, 0x1"), 0),  # an older load is waited for
        (("LDGSTS.E.BYPASS.128", "LDG.E.128"), 1),
        (("MUFU.EX2 R4, R5", "LDG.E.128 R4, desc[UR4][R2.64]"), 2),
    ],
)
def test_waits(change, expected):
    assert sass_loops.waits(sass_loops.parsed(CODE.replace(*change))) == expected


def test_products_that_only_the_next_iteration_waits_for(monkeypatch):
    monkeypatch.setattr(sass_loops, "LEAST", 5)
    monkeypatch.setattr(sass_loops, "MASK", 3)
    (loop,) = sass_loops.loops(sass_loops.parsed(AHEAD))  # a repeated wait's branch is no loop
    edge, whole = sass_loops.loops_of(loop, 4)
    assert edge == replace(whole, instructions=whole.instructions + 3 * 4)
    assert whole.ahead == whole.wgmma / 2 == 2 * 64 * 64 * 16
    assert whole.under == 5 * 4
    assert whole.bytes == 0x8000
    assert whole.waits == 0


@pytest.mark.parametrize(
    ("change", "ahead", "waits"),
    [
        (("MUFU.EX2 R4, R5 ;\n", "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"), 0, 1),
        (("MUFU.EX2 R4, R5", "FADD R4, R5, R6"), 2 * 64 * 64 * 16, 1),
    ],
)
def test_what_is_not_ahead(change, ahead, waits):
    code = sass_loops.parsed(AHEAD.replace(*change))[:12]
    found = sass_loops.loop_of(code, 4)
    assert (found.ahead, found.waits) == (ahead, waits)


LOADED = """
 /*0000*/ LDG.E.128 R8, desc[UR4][R2.64] ;
 /*0010*/ FADD R4, R5, R6 ;
 /*0020*/ MUFU.EX2 R4, R4 ;
 /*0030*/ STG.E.128 desc[UR4][R2.64], R4 ;
 /*0040*/ FADD R5, R11, R7 ;
"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("", ""), 3),
        (("R4, R5, R6", "R9, R5, R6"), 3),  # a write is no use
        (("R4, R5, R6", "R4, R5, R9"), 0),
        (("[R2.64], R4", "[R10.64], R4"), 2),
        (("[R2.64], R4", "[R2.64], R8"), 2),
        (("R11, R7", "R12, R7"), 5),  # never, so the loop comes round to the load
        (("LDG.E.128 R8, desc[UR4][R2", "LDG.E.128 R8, desc[UR4][R8"), 3),
        (("LDG.E.128", "LDG.E"), 5),
        (("R11, R7", "R7, R10.64"), 3),
    ],
)
def test_what_is_issued_until_a_load_is_used(change, expected):
    run = sass_loops.parsed(LOADED.replace(*change))
    assert len(list(sass_loops.until_use(run, 0))) == expected


def test_decode(monkeypatch):
    """With one tile ahead and 256 keys a part, the estimate by hand was 12 to 15 us at batch 1."""
    large, small = (row for name, row in ROWS.items() if name.startswith("decode"))
    assert 3.3 < large.predicted() < H200.memory / 1e12
    assert 6 <= small.predicted() <= 7
    (one,) = (one for one in triton_loops.counted("decode") if one.kernel == "forward_kernel")
    assert one.ahead == FORWARD.hopper[128][3] - 1
    monkeypatch.setattr(rows, "counted", lambda call: [replace(one, ahead=1)])
    monkeypatch.setattr(decode, "LEAST_KEYS", 256)
    assert 12 <= small.predicted() <= 15


@needs_nvcc
def test_adamw_is_bound_by_instructions():
    (adamw,) = (row for name, row in ROWS.items() if name.startswith("AdamW"))
    assert adamw.bound() == "instructions"
    assert 55 <= cuda_loops.adamw_instructions() <= 75
    assert adamw.predicted() > 1e3 * rows.STEP * rows.ADAMW_BYTES / H200.memory


@needs_nvcc
def test_one_row_by_codes_is_bound_by_memory():
    """At most 3.5 instructions per byte, and as many bytes in flight as an H200 needs."""
    assert cuda_loops.int4_instructions() <= 3.5 and cuda_loops.int8_instructions() <= 3.5
    assert cuda_loops.nf4_instructions() <= 3.5
    for name in ("int4", "int8", "nf4"):
        assert ROWS[f"{name} linear, 8192 x 8192, rows of x: 1"].bound() == "memory"
    for kernel in (cuda_loops.INT4[1], cuda_loops.INT8, cuda_loops.NF4[1]):
        assert cuda_loops.bytes_in_flight(kernel) >= 23_000


def test_a_probe_whose_pattern_is_gone_says_so():
    with pytest.raises(ValueError, match="no nothing in the source"):
        cuda_loops.with_constants("int x;", (("nothing", "0"),))


def test_backwards_elsewhere_are_predicted_too_fast():
    """The page says so; if the model learns about shared memory, they move to KERNELS."""
    for kernel in BEYOND:
        for length, known in kernel.pairs():
            assert 1.2 < kernel.predicted(length) / known < 1.7


@needs_nvcc
def test_the_page_has_these_predictions():
    page = (nvcc.ROOT / "docs" / "machine_code.md").read_text()
    section = table.section()
    compilers = re.search(r"sm_90 code of (.*)\.", section)
    if compilers and compilers[1] in page:
        assert table.placed(page, section) == page


def test_a_section_replaces_its_old_one():
    page = f"# Page\n\ntext\n\n{table.TITLE}\n\nold\n\n## More\n\nrest\n"
    new = f"{table.TITLE}\n\nnew\n"
    assert table.placed(page, new) == page.replace("old", "new")
    assert table.placed("# Page\n", new) == f"# Page\n\n{new}"
