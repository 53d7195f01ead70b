"""The demo runs end to end on a tiny model and reports correctly."""

import json
import os
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from children import forked

from fusedops import __main__ as command_line
from fusedops import demo
from fusedops.demo import peak, show
from fusedops.demo.peak import Fresh, in_fresh_processes
from fusedops.demo.training import (
    COMPILED,
    CONTENDERS,
    EAGER,
    FUSED,
    QUICK,
    Settings,
    batches,
    build_model,
    corpus,
)

pytest.importorskip("transformers")


def test_quick_demo(tmp_path, capsys, monkeypatch):
    """With the cache that other tests share: compiling everything again would take a minute.

    It may keep torch.compile's graph, which has no operator of ours. Two contenders are measured in
    processes of their own; the other two differ from one of them in their optimizer.
    """
    emptied = []

    @contextmanager
    def shared_cache():
        emptied.append(True)
        with (
            torch._inductor.config.patch(fx_graph_cache=True),
            torch._functorch.config.patch(enable_autograd_cache=True),
        ):
            yield

    def two_of_them(names, *options):
        fresh = in_fresh_processes([COMPILED, FUSED], *options)
        return {name: fresh.get(name, fresh[FUSED]) for name in names}

    for cache in ("FX_GRAPH_CACHE", "AUTOGRAD_CACHE"):
        monkeypatch.setenv(f"TORCHINDUCTOR_{cache}", "1")
    monkeypatch.setattr(demo, "_empty_cache", shared_cache)
    monkeypatch.setattr(demo, "in_fresh_processes", two_of_them)
    monkeypatch.setattr(demo, "QUICK", replace(QUICK, layers=1))
    results = demo.run(quick=True, threads=1, out=tmp_path)
    assert emptied
    printed = capsys.readouterr().out
    assert results == json.loads((tmp_path / "demo.json").read_text())
    if find_spec("matplotlib"):
        assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert results["report"] in printed
    assert show.notes(results) in printed and show.verdict(results) in printed
    assert results["unavailable"] == {} and list(results["contenders"]) == list(CONTENDERS)
    assert results["fused_over"].keys() == {*CONTENDERS} - {FUSED}
    assert results["fused_over"][EAGER] == results["ratio"]
    assert results["contenders"][FUSED]["over_eager"] == results["ratio"]
    assert results["contenders"][EAGER]["over_eager"]["median"] == 1
    compiled = {name: n["compile_s"] for name, n in results["contenders"].items() if n["compile_s"]}
    assert [*compiled] == [COMPILED]
    assert compiled[COMPILED] > 10 * max(results["contenders"][COMPILED]["seconds"])  # in no step
    for numbers in results["contenders"].values():
        assert len(numbers["losses"]) == len(numbers["seconds"]) == QUICK.steps
        assert numbers["losses"][-1] < numbers["losses"][0]
        assert 0 < numbers["step_p50_s"] <= numbers["step_p95_s"]
        assert 100e6 < numbers["peak_bytes"] < 10e9
    # The same model on the same batches: a few bf16 roundings apart (the losses are near 5).
    assert results["max_loss_difference"] < 0.1
    curves = [numbers["losses"] for numbers in results["contenders"].values()]
    assert all(abs(a - b) < 0.1 for curve in curves for a, b in zip(curve, curves[0], strict=True))


@pytest.mark.parametrize("before", [None, "/before"])
def test_torch_compile_starts_with_an_empty_cache(before, monkeypatch):
    if before is None:
        monkeypatch.delenv(demo.CACHE, raising=False)
    else:
        monkeypatch.setenv(demo.CACHE, before)
    with demo._empty_cache():
        folder = Path(os.environ[demo.CACHE])
        assert folder.is_dir() and not any(folder.iterdir())
    assert os.environ.get(demo.CACHE) == before and not folder.exists()


# The peaks, which take a process for each contender, are those of test_quick_demo.
WITHOUT = """
import sys
from children.without import hide
hide("matplotlib", "rich")
from fusedops import demo
from fusedops.__main__ import main
from fusedops.demo.peak import Fresh
demo.in_fresh_processes = lambda names, *_: {name: Fresh(2**30, None) for name in names}
sys.exit(main(["demo", "--quick", "--out", sys.argv[1]]))
"""


def test_the_demo_without_matplotlib_and_a_compiler(tmp_path):
    environment = os.environ | {"CXX": "no-such-compiler"}
    printed = forked("-c", WITHOUT, tmp_path, env=environment, large=True).printed()
    assert not (tmp_path / "demo.png").exists()
    results = json.loads((tmp_path / "demo.json").read_text())
    assert f"wrote {tmp_path / 'demo.json'}\n" in printed
    lines = printed.splitlines()
    for name, numbers in results["contenders"].items():
        (row,) = (line for line in lines if line.startswith(f"{name}  "))
        peak, p50 = numbers["peak_bytes"] / 2**20, numbers["step_p50_s"] * 1e3
        assert f" {peak:,.0f} " in row and f" {p50:.1f} " in row
    assert results["unavailable"] == {COMPILED: "no C++ compiler"}
    assert COMPILED not in results["contenders"]
    (row,) = (line for line in lines if line.startswith(COMPILED))
    assert row.split(maxsplit=1)[1] == "not available: no C++ compiler"
    assert "compiled in" not in printed and f"as {COMPILED}" not in printed


def test_the_table_fits_a_terminal():
    """80 columns, also for the longest cells."""
    numbers = {"tokens_per_s": 12345.6, "step_p50_s": 0.1234, "step_p95_s": 0.2345}
    numbers |= {"over_eager": {"median": 1.234, "low": 1.12, "high": 1.35}}
    numbers |= {"peak_bytes": 1234 * 2**20, "final_loss": 2.6341}
    for names in (CONTENDERS, (EAGER, FUSED)):
        results = {
            "contenders": dict.fromkeys(names, numbers),
            "unavailable": dict.fromkeys({*CONTENDERS} - {*names}, "no C++ compiler"),
        }
        lines = show.table(results).splitlines()
        assert len(lines) == 1 + len(CONTENDERS) and max(map(len, lines)) <= 80


def test_batches_are_the_same_for_everyone():
    first, second = list(batches(QUICK)), list(batches(QUICK))
    assert len(first) == QUICK.steps
    assert first[0].shape == (QUICK.batch, QUICK.length)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


def test_corpus_is_source_code():
    text = bytes(corpus().to(torch.uint8).tolist())
    assert len(text) > 1_000_000
    assert b"\ndef " in text


def test_models_start_equal():
    first, second = build_model(QUICK), build_model(QUICK)
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert {a.dtype for a, _ in pairs} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("capability", "dtype"), [("AVX512", torch.bfloat16), ("AVX2", torch.float32)]
)
def test_without_bfloat16_products_it_trains_in_float32(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert build_model(demo._settings(None, quick=True)).dtype == dtype


@pytest.mark.parametrize(
    ("ratio", "says"),
    [
        ((1.08, 1.05, 1.1), "1.08 times as fast"),
        ((0.9, 0.85, 0.95), "slower"),
        ((1.01, 0.98, 1.04), "No difference"),
    ],
)
def test_verdict_is_what_the_interval_allows(ratio, says):
    median, low, high = ratio
    fused_over = {"torch.compile": {"median": median, "low": low, "high": high}}
    said = show.verdict({"fused_over": fused_over})
    assert says in said and "torch.compile" in said


def test_the_loss_is_of_the_last_steps_and_the_time_of_those_after_the_first():
    trainers = {
        name: SimpleNamespace(
            losses=[9.0] * 5 + [last] * show.LAST,
            seconds=[9.0] * show.WARMUP + [last] * 2,
            model=torch.nn.Linear(1, 1),
        )
        for name, last in ((EAGER, 2.0), (FUSED, 1.0))
    }
    results = show.summary(trainers, dict.fromkeys(trainers, Fresh(1, None)), QUICK)
    final = {name: numbers["final_loss"] for name, numbers in results["contenders"].items()}
    assert final == {EAGER: 2.0, FUSED: 1.0} and results["max_loss_difference"] == 1.0
    assert results["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_the_peak_is_in_bytes(monkeypatch):
    status = SimpleNamespace(read_text=lambda: "Name:\tdemo\nVmHWM:\t    2048 kB\n")
    monkeypatch.setattr(peak, "Path", lambda _: status)
    assert peak.peak_bytes() == 2 * 2**20


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(demo, "NEEDS", ("torch", "no_such_package"))
    with pytest.raises(ModuleNotFoundError, match=r"no_such_package: pip install 'fusedops\[bench"):
        demo.run(quick=True)


def test_arguments_are_checked_before_the_training(tmp_path):
    with pytest.raises(ValueError, match="steps must be more than 3"):
        demo.run(steps=2, quick=True)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        demo.run(threads=0, quick=True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"out must be a folder, got .*file/demo"):
        demo.run(out=tmp_path / "file" / "demo", quick=True)


def test_the_help_has_the_default_steps(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["demo", "--help"])
    assert f"training steps (default {Settings().steps})" in capsys.readouterr().out


def test_the_command_prints_what_is_wrong_without_a_traceback(monkeypatch, capsys):
    assert command_line.main(["demo", "--quick", "--steps", "2"]) == 1
    assert capsys.readouterr().err == "fusedops demo: steps must be more than 3 (warm-up), got 2\n"
    monkeypatch.setattr(demo, "NEEDS", ("no_such_package",))
    assert command_line.main(["demo"]) == 1
    message = "fusedops demo: needs no_such_package: pip install 'fusedops[bench,hf]'\n"
    assert capsys.readouterr().err == message
