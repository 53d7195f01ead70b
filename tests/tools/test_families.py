"""`make coverage` judges patched model families correctly, and docs/coverage.md has its results."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checks.__main__ import main
from checks.families import judge as judging
from checks.families import planned, sweep, table
from checks.families.families import KINDS
from checks.families.judge import judge
from checks.families.planned import judge_memory
from fusedops import functional
from fusedops.patching.modules import linear

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

DOCS = Path(__file__).parents[2] / "docs"

# Layouts that differ: pre-norm, post-norm, sandwich, experts, latent attention, state spaces,
# encoders, both, towers. `make coverage` judges all families.
SELECTION = {
    "causal": (*("llama", "gpt2", "gemma4_text", "phimoe", "deepseek_v3", "mamba2"),),
    "masked": ("bert", "deberta-v2"),
    "seq2seq": ("t5",),
    "audio": ("wav2vec2",),
    "vision": ("vit",),
    "multimodal": ("qwen2_vl",),
}


@pytest.mark.parametrize(
    "name", [f"{k}/{name}" for k, names in SELECTION.items() for name in names]
)
def test_a_family_is_right(name):
    row = judge(*name.split("/"))
    assert (row["verdict"], row.get("why")) == ("right", "")
    assert row["float64"] and not row["random"] and row["slack"] < 1e-3
    assert row["fused"]["linear"] and row["fused"]["norm"] and not row["text alone"]
    assert row.get("generate", "4 tokens") == "4 tokens"


def test_a_wrong_result_is_seen(monkeypatch):
    monkeypatch.setattr(linear, "linear", lambda *args: functional.linear(*args) * (1 + 1e-4))
    row = judge("causal", "llama")
    assert row["verdict"] == "wrong" and "logits: off by" in row["why"]


class Steeper(torch.autograd.Function):
    """x, whose gradient is a little too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 + 1e-4)


def test_a_wrong_gradient_is_seen(monkeypatch):
    monkeypatch.setattr(linear, "linear", lambda *a: Steeper.apply(functional.linear(*a)))
    row = judge("masked", "bert")
    assert row["verdict"] == "wrong" and row["why"].startswith("gradient of")


def test_what_unpatch_leaves_is_seen(monkeypatch):
    monkeypatch.setattr(judging, "unpatch", lambda model: None)
    row = judge("causal", "gpt2")
    assert row["verdict"] == "unpatch" and "classes differ after unpatch" in row["why"]


def end(to, kind, family):
    os._exit(3)


def hang(to, kind, family):
    time.sleep(60)


def test_a_process_that_ends_or_hangs_is_a_verdict():
    row = sweep.alone("causal", "llama", 60, end)
    assert (row["verdict"], row["why"]) == ("died", "its process exited with code 3")
    row = sweep.alone("causal", "llama", 0.5, hang)
    assert (row["verdict"], row["why"]) == ("timeout", "more than 0.5 seconds")


def test_a_sweep_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    options = ["--kind", "causal", "--json", str(file), "--markdown", str(page)]
    assert main(["families", "gpt2", *options]) == 0
    assert [row["family"] for row in json.loads(file.read_text())["rows"]] == ["gpt2"]
    assert main(["families", "gpt2", "opt", *options]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "2 of 2  causal opt" in told[2] and told[3].startswith("causal: 2 families: 2 right")
    assert [row["family"] for row in json.loads(file.read_text())["rows"]] == ["gpt2", "opt"]
    assert "| gpt2 | right | 5/5 | 4/4 | 2/2 |" in page.read_text()
    monkeypatch.setattr(sweep, "versions", lambda: {"transformers": "another"})
    assert main(["families", "opt", *options]) == 0
    assert [row["family"] for row in json.loads(file.read_text())["rows"]] == ["opt"]
    with pytest.raises(ValueError, match="no causal family gpt-0"):
        main(["families", "gpt-0", *options])


def test_a_plan_that_is_wrong_is_seen(monkeypatch):
    plan = planned.memory
    monkeypatch.setattr(planned, "memory", lambda *a, **k: replace(plan(*a, **k), logits=10**6))
    row = judge_memory("causal", "gpt2")
    assert row["verdict"] == "wrong" and row["why"].startswith("pad_token_id=0: logits 1,000,000 f")
    monkeypatch.setattr(planned, "memory", lambda *a, **k: 1 / 0)
    row = judge_memory("causal", "gpt2")
    assert row["verdict"] == "crash" and row["why"].endswith("ZeroDivisionError: division by zero")


def test_a_table_says_what_is_wrong():
    sites = {"found": {"norm": 2}, "fused": {"norm": 1}, "skipped": [["norm", "its own", 1]]}
    rows = [
        {"kind": "causal", "family": "a", "verdict": "wrong", "why": "loss: off", **sites},
        {"kind": "causal", "family": "b", "verdict": "not built", "why": "no a|b"},
    ]
    assert not table.all_right(rows)
    page = table.markdown(rows, {"torch": "2"})
    assert "| a | wrong: loss: off | 1/2 |  |  |  |  |  |  |  | norm: its own |" in page
    assert "- b: no a|b" in page
    assert table.summary(rows).startswith("causal: 2 families: 1 wrong, 1 not built; fused")


def test_the_page_is_that_of_the_rows():
    held = json.loads((DOCS / "coverage.json").read_text())
    page = table.markdown(held["rows"], held["versions"])
    assert (DOCS / "coverage.md").read_text() == page
    assert table.all_right(held["rows"])


def test_the_guide_counts_as_the_rows_do():
    rows = json.loads((DOCS / "coverage.json").read_text())["rows"]
    guide = " ".join((DOCS / "guides" / "patch.md").read_text().split())
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        right = sum(row["verdict"] == "right" for row in mine)
        assert re.search(rf"\b{right} of {len(mine)} (causal models|{kind})", guide)
        if kind == "causal":
            assert f"{right} of {len(mine)} causal models" in readme
    losses = [row for row in rows if row["kind"] == "causal" and row.get("fused", {}).get("loss")]
    assert len(losses) >= 120
