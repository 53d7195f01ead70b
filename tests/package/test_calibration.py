"""Tests of timed calls, which choose between our kernels and torch's code, and of tables."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from children import forked

import fusedops
from fusedops import _C, doctor
from fusedops import __main__ as command_line
from fusedops.calibration import attention, choice, run, table
from fusedops.calibration.contest import Case, Contest, measured_ratio, wrong
from fusedops.calibration.table import CPUKind, Table, TimedCall
from fusedops.measuring.alternate import Rounds
from fusedops.testing import threads

pytestmark = pytest.mark.skipif(_C.cpu_isa() == "none", reason="there are no kernels to choose")

F32, BF16 = torch.float32, torch.bfloat16
KIND = "attention float32 forward none 1 thread"
TOGETHER = "attention float32 forward none threads"
SIZES = (4, 1, 100, 100, 64)


@pytest.fixture
def loaded():
    """Loads tables; the CPU's own is loaded again after the test."""
    yield choice.load
    choice.load_chosen()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder. Returns the file in which `chosen` looks for the user's table."""
    monkeypatch.setenv("FUSEDOPS_CACHE", str(tmp_path))
    return table.user_path()


def about(**changed):
    here = {"fusedops": fusedops.__version__, "cpu": str(table.cpu_kind()), "device": "this CPU"}
    return here | {"date": "2026-11-29T10:00:00"} | changed


def pays(sizes=SIZES, kind=KIND):
    return _C.timed_call_pays(kind, sizes)


def attention_pays(dtype=F32, trains=False, mask="none", sizes=SIZES):
    heads, group, queries, keys, width = sizes
    query, key = (torch.Size(s) for s in ((1, heads, queries, width), (1, heads // group, keys, 0)))
    return choice.attention_pays(dtype, trains, mask, query, key)


# The choice.


def test_the_nearest_three_calls_decide(loaded):
    """Against the formula in Python: means of logarithms, weighted by 1 / distance^2."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 5000, (60, 3), generator=random).tolist()
    ratios = torch.empty(60).uniform_(0.2, 3, generator=random).tolist()
    calls = [TimedCall(tuple(s), r) for s, r in zip(sizes[:50], ratios[:50], strict=True)]
    loaded(Table(about(), {"any kind": calls}))
    for point in sizes[50:]:
        squares = [
            sum((math.log2(a) - math.log2(b)) ** 2 for a, b in zip(point, call.sizes, strict=True))
            for call in calls
        ]
        nearest = sorted(zip(squares, calls, strict=True))[:3]
        sum_of_weights = sum(1 / square for square, _ in nearest)
        mean = sum(math.log2(call.ratio) / square for square, call in nearest) / sum_of_weights
        assert _C.timed_call_ratio("any kind", point) == pytest.approx(2**mean, rel=1e-4)
    for call in calls:
        assert _C.timed_call_ratio("any kind", call.sizes) == pytest.approx(call.ratio, rel=1e-5)


@pytest.mark.parametrize(("ratio", "taken"), [(0.5, True), (0.96, True), (0.98, False), (2, False)])
def test_our_kernel_has_to_be_faster(loaded, ratio, taken):
    loaded(Table(about(), {KIND: [TimedCall(SIZES, ratio)]}))
    assert pays() == taken == pays((1, 8, 3, 5000, 48))


def test_the_choice_depends_on_the_call_and_the_table_alone(loaded):
    few, many = TimedCall((4, 1, 16, 16, 64), 3.0), TimedCall((4, 1, 1024, 1024, 64), 0.3)
    tables = Table(about(), {KIND: [few, many]}), Table(about(), {KIND: [many]}), None
    results = []
    for _ in range(2):
        for chosen in tables:
            loaded(chosen)
            with threads(1):
                results += [attention_pays(sizes=call.sizes) for call in (few, many)]
    assert results == [False, True, True, True, False, False] * 2


def test_nothing_timed_leaves_a_call_to_torch(loaded):
    loaded(Table(about(), {KIND: [TimedCall(SIZES, 0.1)]}))
    with threads(1):
        assert attention_pays()
        assert not attention_pays(trains=True)
        assert not attention_pays(dtype=BF16)
        assert not attention_pays(mask="bool")
    with threads(2):
        assert attention_pays()  # by the calls with one thread
        loaded(Table(about(), {TOGETHER: [TimedCall(SIZES, 0.1)]}))
        assert attention_pays()
    with threads(1):
        assert not attention_pays()
    both = {KIND: [TimedCall(SIZES, 0.1)], TOGETHER: [TimedCall(SIZES, 3.0)]}
    loaded(Table(about(), both))
    with threads(2):
        assert not attention_pays()


def test_another_number_of_sizes_is_an_error(loaded):
    loaded(Table(about(), {KIND: [TimedCall(SIZES, 0.1)]}))
    with pytest.raises(RuntimeError, match="calls have 5 sizes, got 2"):
        pays((3, 4))
    with pytest.raises(RuntimeError, match="3 sizes do not belong to 2 ratios"):
        _C.set_timed_calls("any kind", [1, 2, 3], [1.0, 2.0])


# Which table.


def test_the_users_table_comes_first(cache):
    assert table.chosen().path.parent == table.SHIPPED and not table.chosen().refused
    Table(about(), {KIND: [TimedCall(SIZES, 0.25)]}).write(cache)
    chosen = table.chosen()
    assert (chosen.path, chosen.refused) == (cache, "")
    assert chosen.table.calls == {KIND: [TimedCall(SIZES, 0.25)]}


def content(**calls):
    return json.dumps({"about": about()} | calls)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is no table of timed calls"),
        ("[1]", "it is no table of timed calls"),
        ("{}", "it is no table of timed calls: KeyError('about')"),
        (content(kind=[[1, 2, "fast"]]), "a ratio must be a positive number, got 'fast'"),
        (content(kind=[[1, 2, -1.0]]), "a ratio must be a positive number, got -1.0"),
        (content(kind=[[1, 0, 1.0]]), "sizes of a call must be positive integers, got [1, 0]"),
        (content(kind=[[1, 2.5, 1.0]]), "sizes of a call must be positive integers, got [1, 2.5]"),
        (content(kind=[[1, 2, 1.0], [1, 1.0]]), "calls of 'kind' do not have equally many sizes"),
        (
            json.dumps({"about": about(cpu="intel-amx-family-6")}),
            "with cpu intel-amx-family-6, not",
        ),
        (json.dumps({"about": about(fusedops="0.0.1")}), "with fusedops 0.0.1, not"),
    ],
)
def test_a_broken_or_foreign_table_is_refused(loaded, cache, text, reason):
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    chosen = table.chosen()
    assert chosen.path.parent == table.SHIPPED
    assert chosen.refused.startswith(f"{cache} is not used: ") and reason in chosen.refused
    with pytest.warns(UserWarning, match=re.escape(chosen.refused)):
        choice.load_chosen()
    finding = doctor.calibration(chosen, str(table.cpu_kind()), {})
    assert finding.level == doctor.WARNING and chosen.refused in finding.text
    assert finding.fix == "fusedops calibrate"


def test_without_a_home_folder_a_shipped_table_is_used(monkeypatch):
    for name in ("FUSEDOPS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert table.chosen().path.parent == table.SHIPPED


def test_shipped_tables_have_every_kind_of_call():
    for path in table.SHIPPED.glob("*.json"):
        shipped = Table.read(path)
        assert shipped.about["cpu"] == path.stem == str(CPUKind.parse(path.stem))
        assert shipped.about["date"] and shipped.about["commit"]
        assert {"attention", "linear"} <= {*shipped.families()}
        kinds = {case.kind for case in run.cases(shipped.families())}
        assert {*shipped.calls} >= {choice.with_threads(kind, 1) for kind in kinds}


SHIPPED = ("amd-avx2-family-23", "amd-avx512_bf16-family-25", "intel-amx-family-6")


@pytest.mark.parametrize(
    ("here", "chosen"),
    [
        ("amd-avx512_bf16-family-25", "amd-avx512_bf16-family-25"),
        ("amd-avx512_bf16-family-26", "amd-avx512_bf16-family-25"),
        ("intel-avx512_bf16-family-6", "amd-avx512_bf16-family-25"),
        ("amd-avx512-family-25", "amd-avx512_bf16-family-25"),
        ("intel-amx-family-19", "intel-amx-family-6"),
        ("intel-avx2-family-6", "amd-avx2-family-23"),
    ],
)
def test_the_most_similar_cpus_table_is_used(cache, monkeypatch, tmp_path, here, chosen):
    kinds = "attention float32 forward none", "linear float32 product", "linear bfloat16 few"
    for name in SHIPPED:
        calls = {f"{kind} 1 thread": [TimedCall(SIZES, 0.5)] for kind in kinds}
        Table(about(cpu=name), calls).write(tmp_path / f"{name}.json")
    monkeypatch.setattr(table, "SHIPPED", tmp_path)
    monkeypatch.setattr(table, "cpu_kind", lambda: CPUKind.parse(here))
    selected = table.chosen()
    assert selected.path.stem == chosen
    (vendor, isa, _), there = CPUKind.parse(here), CPUKind.parse(chosen)
    fits = True, vendor == there.vendor, isa == there.isa
    expected = {kind for kind, fit in zip(kinds, fits, strict=True) if fit}
    assert {kind.removesuffix(" 1 thread") for kind in selected.table.calls} == expected
    finding = doctor.calibration(selected, here, {})
    assert str(selected.path) in finding.text
    assert finding.level == (doctor.OK if here == chosen else doctor.WARNING)
    assert (chosen in finding.text and here in finding.text) or here == chosen


def test_another_name_is_no_kind_of_cpu():
    with pytest.raises(ValueError, match="'amd-sse2-family-1' is no kind of CPU"):
        CPUKind.parse("amd-sse2-family-1")


def start(value):
    code = "import fusedops; from fusedops.calibration import choice; print(len(choice._loaded))"
    return forked("-c", code, env=os.environ | {"FUSEDOPS_CALIBRATE": value}).result()


def test_the_variable_switches_tables_off(monkeypatch):
    assert start("off").stdout.split() == ["0"] != start("").stdout.split()
    told = start("on").stderr.strip().splitlines()[-1]
    assert told == "ValueError: FUSEDOPS_CALIBRATE must be 'off' or empty, got 'on'"
    monkeypatch.setenv("FUSEDOPS_CALIBRATE", "off")
    with pytest.raises(ValueError, match="FUSEDOPS_CALIBRATE=off leaves all timed calls to torch"):
        fusedops.calibrate()
    finding = doctor.calibration(table.chosen(), str(table.cpu_kind()), os.environ)
    assert finding.level == doctor.WARNING and finding.fix == "unset FUSEDOPS_CALIBRATE"


def test_without_kernels_there_is_nothing_to_choose(monkeypatch):
    monkeypatch.setattr(table, "UNCOMPILED", "no compiler")
    assert table.chosen() is None
    assert "no kernels" in doctor.calibration(None, "", {}).text


# Measuring.


def test_a_table_keeps_the_other_families_of_its_file(tmp_path):
    path, other = tmp_path / "folder" / "t.json", {"other float32": [TimedCall((7,), 0.5)]}
    Table(about(), other | {KIND: [TimedCall(SIZES, 0.123456)]}).write(path)
    newer = Table(about(), {KIND: [TimedCall(SIZES, 2.0)]})
    assert Table.read(path).calls == other | {KIND: [TimedCall(SIZES, 0.123)]}
    assert run.with_earlier(newer, path).calls == other | newer.calls
    for changed in ({"cpu": "another"}, {"fusedops": "0.0.1"}):
        Table(about(**changed), other).write(path)
        assert run.with_earlier(newer, path).calls == newer.calls
    path.write_text("{")
    assert run.with_earlier(newer, path).calls == newer.calls


def product(rows, times, wrong_by=0.0):
    """A contest in which ours multiplies so many times."""
    x = torch.randn(rows, rows, generator=torch.Generator().manual_seed(0))

    def ours():
        for _ in range(times):
            y = x @ x
        return y + wrong_by if wrong_by else y

    return Contest(ours, lambda: x @ x, lambda: x.double() @ x.double(), False)


@pytest.mark.parametrize(("times", "least", "most"), [(1, 0.8, 1.25), (3, 2.0, 4.0)])
def test_the_ratio_of_two_calls(times, least, most):
    with threads(1):
        assert least < measured_ratio(product(200, times), Rounds(15, 61, 0.2)) < most


def test_a_wrong_result_leaves_its_kind_to_torch():
    with threads(1):
        assert wrong(product(20, 1)) is None and "norm of the error" in wrong(product(20, 1, 0.01))
        several = {"wrong kind threads": [TimedCall((20,), 0.5)]}
        measured, mistakes = Table(about(), several), {}
        cases = [
            Case("right kind", (20,), lambda: product(20, 1)),
            Case("wrong kind", (20,), lambda: product(20, 1, 0.01)),
            Case("wrong kind", (30,), lambda: product(30, 1)),
        ]
        run.measure(cases, measured, mistakes)
    assert [*measured.calls] == ["right kind 1 thread"]
    assert [*mistakes] == ["wrong kind"] and "(20,)" in mistakes["wrong kind"]
    text = str(run.Calibration(measured, Path("t.json"), 3.2, mistakes))
    assert "3 s, table in t.json" in text and "wrong kind: wrong results" in text


def test_when_the_seconds_are_over_each_kind_still_has_a_call():
    cases = [Case(f"kind {n % 3}", (n + 1,), lambda: product(8, 1)) for n in range(30)]
    measured = Table(about())
    with threads(1):
        run.measure(cases, measured, {}, end=0.0)
    assert {kind: len(calls) for kind, calls in measured.calls.items()} == {
        f"kind {n} 1 thread": 1 for n in range(3)
    }


@pytest.mark.parametrize("mask", attention.MASKS)
@pytest.mark.parametrize("trains", [False, True])
def test_attentions_cases_compare_equal_results(mask, trains):
    for sizes in ((4, 1, 24, 24, 32), (8, 4, 40, 40, 64)):
        contest = attention.case(F32, trains, mask, sizes).make()
        assert contest.trains == trains and (contest.exact is None) == (mask == "dropout")
        assert wrong(contest) is None
        assert mask == "dropout" or wrong(contest._replace(ours=doubled(contest.torchs)))


def doubled(run):
    def results():
        tensors = run()
        return 2 * tensors if isinstance(tensors, torch.Tensor) else tuple(2 * t for t in tensors)

    return results


def test_arguments(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"families must be .*attention.*, got 'norms'"):
        fusedops.calibrate(["norms"])
    with pytest.raises(ValueError, match=r"device must be .*cpu.*, got 'cuda'"):
        fusedops.calibrate(device="cuda")
    for families in ("attention", 3):
        with pytest.raises(TypeError, match="families must be a list of names"):
            fusedops.calibrate(families)
    with pytest.raises(ValueError, match="budget_s"):
        fusedops.calibrate(budget_s=0)
    assert command_line.main(["calibrate", "--families", "norms"]) == 1
    assert "fusedops calibrate: families must be" in capsys.readouterr().err
