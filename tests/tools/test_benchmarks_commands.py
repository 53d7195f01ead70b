"""Benchmark commands run with `--quick` and write their results as JSON."""

import json
from dataclasses import replace
from itertools import product

import pytest

from benchmarks import __main__ as command_line
from benchmarks.__main__ import main
from benchmarks.workloads import generate


@pytest.fixture
def measured_here(monkeypatch, tmp_path):
    """Commands measure in this process under the default allocator: nothing is imported again."""

    def run(argv, allocator):
        path = tmp_path / "rows.json"
        words = [*argv, "--worker", "--allocator", "default", "--json", str(path)]
        return main(words), json.loads(path.read_text())

    monkeypatch.setattr(command_line, "_run", run)


def test_adamw_writes_rows_and_goals(tmp_path, measured_here):
    path = tmp_path / "out.json"
    main(["adamw", "--quick", "--seconds", "0.05", "--allocator", "default", "--json", str(path)])
    document = json.loads(path.read_text())
    contenders = [row["contender"] for row in document["rows"]]
    assert contenders == ["torch fused", "fusedops float32", "fusedops int8", "copy"]
    assert [goal["what"] for goal in document["goals"]] == ["fusedops int8 over torch fused"]
    assert all(row["median_s"] > 0 for row in document["rows"])


def test_generate_writes_times_tokens_and_what_ran(tmp_path, monkeypatch, measured_here):
    path = tmp_path / "out.json"
    monkeypatch.setattr(generate, "QUICK", replace(generate.QUICK, layers=1, rounds=1))
    monkeypatch.setattr(generate, "PROFILED", 1)
    assert main(["generate", "--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    caches = [row["title"].split(", ")[2] for row in rows]
    assert [caches.count(f"a {cache}Cache") for cache in ("Dynamic", "Static")] == [4, 6]
    for row in rows:
        assert 0 < row["first_token_s"] < row["total_s"]
        assert 0 < row["token_p50_s"] <= row["token_p95_s"] <= row["token_p99_s"]
        assert row["kernels_s"] > 0
        assert 0 <= row["equal_tokens"] <= row["new_tokens"] == generate.QUICK.new
        ours = row["attention"].get("fusedops::attention_forward", 0)
        assert (ours == 0) == (row["contender"] == generate.BASE)
    base = [row for row in rows if row["contender"] == generate.BASE]
    assert all(row["equal_tokens"] == row["new_tokens"] for row in base)


def test_small_times_patch_and_both_sides_of_each_call(tmp_path, measured_here):
    path = tmp_path / "out.json"
    assert main(["small", "--quick", "--json", str(path)]) in (0, 1)  # so short a time is noise
    document = json.loads(path.read_text())
    assert {row["contender"] for row in document["rows"]} == {"eager", "fusedops"}
    patch, *calls = document["goals"]
    assert patch["measured"] > 0 and patch["memory_bytes"] >= 0
    assert [goal["title"].partition(" of")[0] for goal in calls] == ["forward", "training step"]
    assert all(goal["measured"][0] > 0 for goal in calls)


def test_models_times_training_and_inference_in_both_dtypes(tmp_path, measured_here):
    path = tmp_path / "out.json"
    assert main(["models", "--quick", "--json", str(path)]) in (0, 1)  # so short a time is noise
    rows = json.loads(path.read_text())["rows"]
    expected = {*product(("training", "inference"), ("float32", "bfloat16"))}
    assert {(row["mode"], row["dtype"]) for row in rows} == expected and len(rows) == 4
    assert all(row["over_eager"][0] > 0 for row in rows)


def test_command_without_a_row():
    with pytest.raises(SystemExit, match="no row of norm has 'nothing' in its title"):
        main(["norm", "--quick", "--allocator", "default", "--match", "nothing"])


def test_command_writes_both_allocators(tmp_path):
    path = tmp_path / "out.json"
    rows = ["--match", "add_rms_norm forward+backward bfloat16 [512"]
    status = main(["norm", "--quick", "--seconds", "0.01", *rows, "--json", str(path)])
    document = json.loads(path.read_text())
    assert status == 0
    assert {row["allocator"] for row in document["rows"]} == {"default", "keep"}
    assert {"device", "threads", "torch", "transformers", "date", "commit"} <= set(
        document["environment"]
    )
    assert document["goals"] == []


def test_mixtures_are_compared_with_each_of_transformers_implementations(tmp_path, measured_here):
    path = tmp_path / "out.json"
    command = ["mixtures", "--quick", "--seconds", "0.05", "--json", str(path)]
    assert main(command) in (0, 1)  # so short a time is noise
    document = json.loads(path.read_text())
    contenders: dict[str, list[str]] = {}
    for row in document["rows"]:
        contenders.setdefault(row["title"].partition(" of")[0], []).append(row["contender"])
        assert row["median_s"] > 0
    theirs = ["eager", "grouped_mm", "batched_mm"]
    assert contenders == {
        "generate": [*theirs, "fusedops", "fusedops, nf4"] * 2,
        "training step": [*theirs[1:], "fusedops"] * 2,
    }
    overs = [goal["what"] for goal in document["goals"]]
    assert overs.count("fusedops over grouped_mm") == 4 and len(overs) == 16
