"""Thresholds for using torch's code in attention, losses and linears, and fuse_always."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from axes import grid
from calling import operators
from children import forked
from torch import nn

import fusedops
from fusedops import _C, backend, fuse_always, patch
from fusedops.calibration import choice
from fusedops.calibration.table import Table, TimedCall
from fusedops.patching.core import thresholds
from fusedops.patching.models.attention.interface import attention_forward
from fusedops.patching.modules.linear import form_of
from patching.lines.residual_cases import N

transformers = pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama  # noqa: E402

from patching.models.attention_models import batch, build  # noqa: E402
from patching.models.loss_cases import IDS, LABELS, llama, made, patched  # noqa: E402

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def always():
    """Returns every threshold's result for small tensors."""
    q = torch.randn(1, 1, 8, 8)
    x, weight = torch.randn(4, 8), torch.randn(16, 8)
    return [
        thresholds.attention_pays(q, q, None, False, 0.0),
        not thresholds.logits_pay(x, weight, BF16),
        not thresholds.linear_loses(weight, False),
        _C.own_product_pays(F32, 1, 1, 1, False),
    ]


# What is left to torch.


class Layer(nn.Module):
    is_causal, num_key_value_groups, layer_idx = False, 2, 0


@pytest.fixture
def timed():
    """Has timed calls decide, {kind: [(sizes, ratio), ...]}, for any number of threads."""

    def load(kinds):
        calls = {
            choice.with_threads(kind, threads): [TimedCall(*call) for call in timed_calls]
            for kind, timed_calls in kinds.items()
            for threads in (1, 2)
        }
        choice.load(Table({}, calls))

    yield load
    choice.load_chosen()


@pytest.fixture
def untimed(timed):
    """Leaves all kinds of timed calls to torch."""
    timed({})


WAYS = "forward", "backward"
HIDDEN = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("kind", "dtype", "cast", "passed"),
    [
        ("float32 forward none", F32, False, {}),
        ("float32 forward causal", F32, False, {"is_causal": True}),
        ("float32 forward bool", F32, False, {"attention_mask": HIDDEN}),
        ("float32 forward numbers", F32, False, {"attention_mask": HIDDEN.float()}),
        ("float32 forward none", F32, False, {"dropout": 0.1}),  # rare, and not timed
        ("float32 backward none", F32, False, {}),
        ("float32 backward dropout", F32, False, {"dropout": 0.1, "is_causal": True}),
        ("bfloat16 forward none", BF16, False, {}),
        ("bfloat16 forward none", F32, True, {}),
    ],
)
def test_timed_calls_of_its_kind_decide(kind, dtype, cast, passed, calls, timed):
    sizes, trains = (8, 2, 64, 64, 32), "backward" in kind
    q, k, v = (
        torch.randn(2, heads, 64, 32, dtype=dtype, requires_grad=trains) for heads in (4, 2, 2)
    )

    def is_taken(ratio):
        timed({f"attention {kind} grouped": [(sizes, ratio)]})
        calls.clear()
        with torch.autocast("cpu", BF16, enabled=cast):
            attention_forward(Layer(), q, k, v, **{"attention_mask": None} | passed)
        return bool(calls)

    assert is_taken(0.5) and not is_taken(2.0)
    with fuse_always():
        assert is_taken(2.0)


def test_the_sizes_decide(calls, timed):
    """Few queries and many, narrow and wide, few heads and many."""
    slow, fast = (8, 2, 64, 64, 32), (8, 2, 64, 256, 32)
    timed({"attention float32 forward none grouped": [(slow, 2.0), (fast, 0.5)]})
    for keys, taken in ((64, 0), (256, 1), (65, 1), (250, 2)):
        q, k, v = (torch.randn(2, *size, 32) for size in ((4, 64), (2, keys), (2, keys)))
        attention_forward(Layer(), q, k, v, None)
        assert len(calls) == taken


def test_a_call_that_sdpa_lacks_is_never_left_to_it(calls, timed):
    timed({"attention float32 forward none grouped": [((8, 2, 64, 64, 32), 2.0)]})
    q, k, v = (torch.randn(2, heads, 64, 32) for heads in (4, 2, 2))
    attention_forward(Layer(), q, k, v, None, softcap=3.0)
    assert len(calls) == 1


BYTES = 2 * IDS.numel() * 64


@grid(
    "dtype,ratio,limit,computed",
    [
        (BF16, 2.0, BYTES, True),
        (BF16, 2.0, BYTES - 1, False),
        (BF16, 0.5, BYTES, False),
        (F32, 2.0, BYTES * 2, False),
    ],
)
def test_few_logits_are_made_in_16_bits(dtype, ratio, limit, computed, monkeypatch, timed):
    """A product that is made once may be faster than one that the backward makes again."""
    monkeypatch.setattr(thresholds, "LOGITS", limit)
    name = str(dtype).removeprefix("torch.")
    timed({f"cross_entropy {name} {way} head": [((16, 64, 32), ratio)] for way in WAYS})
    model = llama().to(dtype)
    plain = model(IDS, labels=LABELS)
    plain.loss.backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    outputs = patched(model)(IDS, labels=LABELS)
    outputs.loss.backward()
    assert made(outputs) == computed
    near = {"rtol": 0.05, "atol": 0.02} if dtype == BF16 else {}
    torch.testing.assert_close(outputs.loss.float(), plain.loss.float(), **near)
    torch.testing.assert_close([p.grad for p in model.parameters()], before, **near)
    with fuse_always():
        assert not made(model(IDS, labels=LABELS))


def test_without_a_kernel_the_product_is_torchs():
    model = nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N)).double()
    report = patch(model)
    assert not [site for site in report.fused if site.kind == "linear"]
    assert ["float64" in site.reason for site in report.kept] == [True]
    with fuse_always():
        report = patch(model)
    assert [site.path for site in report.fused if site.kind == "linear"] == ["0"]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_linears_that_are_faster_for_a_few_rows_are_fused(dtype, ratio, timed):
    """Every size of a dtype is, if torch's oneDNN has no product of that dtype on this CPU."""
    names = {BF16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    timed({f"linear {str(dtype).removeprefix('torch.')} few": [((1, 160, 160), ratio)]})
    expected_rows = [1] * (ratio < 1)
    if not getattr(torch.ops.mkldnn, names[dtype])():
        expected_rows.append(64)
    model = nn.Sequential(nn.Linear(160, 160)).to(dtype)
    assert len(patch(model).fused) == bool(expected_rows)
    x, ours = torch.randn(64, 160, dtype=dtype), []
    for rows in (1, 64):
        with torch.profiler.profile() as profile, torch.no_grad():
            out = model(x[:rows])
        torch.testing.assert_close(out, nn.functional.linear(x[:rows], *model[0].parameters()))
        ours += [rows] * any(event.name == "fusedops::linear" for event in profile.events())
    assert ours == expected_rows


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_timed_products_decide_in_float32(ratio, transposed, timed):
    """A weight that its module keeps as [depth, columns] has a kind of its own."""
    sizes, other = (1024, 160, 96), 1 / ratio
    timed(
        {
            "linear float32 across": [(sizes, other if transposed else ratio)],
            "linear float32 product": [(sizes, ratio if transposed else other)],
        }
    )
    weight = torch.randn(96, 160) if transposed else torch.randn(160, 96)
    assert bool(thresholds.linear_loses(weight, transposed)) == (ratio > 1)
    assert _C.own_product_pays(F32, 33, 160, 96, not transposed) == (ratio < 1)
    assert not _C.own_product_pays(F32, 32, 160, 96, not transposed)


def test_eager_code_is_probed_whatever_the_probes_size(monkeypatch):
    """Its few queries would be left to that very code."""
    eager = modeling_llama.eager_attention_forward

    def other(module, *args, **kwargs):
        out, weights = eager(module, *args, **kwargs)
        return out * 1.01, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
    model = build("llama")
    model.set_attn_implementation("eager")
    left = [site.reason for site in patch(model).skipped if site.kind == "attention"]
    assert left == ["its eager attention gives different results"] * 2


# fuse_always.


def test_every_threshold_is_off_in_the_block(untimed):
    before = always()
    assert before[:4] == [False] * 4
    with fuse_always():
        assert all(always())
    assert always() == before


def test_blocks_may_be_nested_and_left_by_an_exception(untimed):
    before = always()
    with fuse_always():
        with pytest.raises(ValueError, match="of the user"), fuse_always():
            raise ValueError("of the user")
        assert all(always())
    assert always() == before


def test_blocks_of_several_threads_may_overlap(untimed):
    """The first to begin is the first to end."""
    before, meet = always(), Barrier(2)

    def first():
        with fuse_always():
            meet.wait()
        meet.wait()
        return always()

    def second():
        meet.wait()
        with fuse_always():
            meet.wait()
            return all(always())

    with ThreadPoolExecutor(2) as pool:
        assert [pool.submit(f) for f in (first, second)][1].result()
    assert always() == before

    def many(_):
        for _ in range(200):
            with fuse_always():
                assert all(always())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(many, range(8)))
    assert always() == before


def test_a_forced_backend_in_the_block_and_around_it(untimed):
    """Either has `linear` run its kernel at any size, until both have ended."""
    pays = _C.own_product_pays
    with fuse_always():
        with backend("reference"):
            assert pays(F32, 1, 1, 1, False)
        assert pays(F32, 1, 1, 1, False)
    with backend("reference"):
        with fuse_always():
            assert fusedops.backends.forced() == "reference"
        assert pays(F32, 1, 1, 1, False)
        q = torch.randn(1, 1, 8, 8)
        assert not thresholds.attention_pays(q, q, None, False, 0.0)
    assert not pays(F32, 1, 1, 1, False)


def test_what_was_compiled_is_compiled_again(monkeypatch):
    monkeypatch.setattr(thresholds, "_few_rows", {})  # other models' linears of this size
    model, x = nn.Sequential(nn.LayerNorm(N), nn.Linear(N, N)), torch.randn(2, N)
    with fuse_always():
        patch(model)
    assert form_of(model[1]) is not None
    node_counts = []

    def collect(graph, example):
        node_counts.append(sum("fusedops" in str(node.target) for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=collect, fullgraph=True)
    for expected in (0, 2):
        with fuse_always() if expected else torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert node_counts[-1] == expected
    torch._dynamo.reset()


def test_a_model_of_few_tokens_runs_every_kernel(calls, sums):
    with fuse_always():
        model = build("llama")
        report = patch(model)
        model(**batch("llama"))
    assert len(calls) == 2 and sums.call_count
    assert report.coverage["linear"] == (15, 15)


def start(value):
    code = "from fusedops import _C; import torch"
    code += "; print(_C.own_product_pays(torch.float32, 1, 1, 1, False))"
    return forked("-c", code, env=os.environ | {"FUSEDOPS_FUSE": value}).result()


@pytest.mark.parametrize(("value", "printed"), [("", "False"), ("always", "True")])
def test_environment_variable(value, printed):
    assert start(value).stdout.strip() == printed


def test_another_value_of_the_variable_is_an_error():
    told = start("1").stderr.strip().splitlines()[-1]
    assert told == "ValueError: FUSEDOPS_FUSE must be 'always' or empty, got '1'"


@pytest.mark.parametrize("rows", [1, 64])
def test_few_rows_keep_their_kernel_under_compile(rows, timed):
    """Inductor calls oneDNN, which reads a weight of few rows at half the speed, if it can."""
    timed({"linear bfloat16 few": [((1, 512, 256), 0.5), ((32, 512, 256), 2.0)]})
    model = nn.Sequential(nn.Linear(256, 512, bias=False)).bfloat16()
    patch(model)
    few = _C.few_rows_pay(BF16, rows, 512, 256, False)
    lacks = _C.own_product_pays(BF16, rows, 512, 256, False)
    assert bool(operators(model, torch.randn(rows, 256).bfloat16())) == (few or lacks)
    assert few == (rows == 1)
