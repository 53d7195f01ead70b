"""Tests of the record of benchmarked GPUs and its reminder."""

import json
import os

import pytest

from fusedops import cache, measured

GPU = "NVIDIA H200"
LINE = (
    "not measured on this GPU (NVIDIA H200): "
    "`fusedops bench MODEL --device cuda` compares eager, compiled and patched"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDOPS_CACHE", str(tmp_path / "new"))
    return tmp_path / "new"


def test_a_gpu_is_unknown_until_it_was_measured(folder):
    assert not measured.is_measured(GPU) and measured.reminder([GPU, GPU]) == [LINE]
    measured.remember(GPU, "2026-11-25T16:00:00+00:00")
    assert measured.is_measured(GPU) and measured.reminder([GPU]) == []
    assert measured.reminder([GPU, "NVIDIA L4"]) == [LINE.replace("H200", "L4")]
    measured.remember("NVIDIA L4", "2026-11-26T16:00:00+00:00")
    assert measured.reminder([GPU, "NVIDIA L4"]) == []
    (path,) = folder.iterdir()
    of = {"fusedops": cache.version(), "date": "2026-11-25T16:00:00+00:00"}
    assert json.loads(path.read_text())[GPU] == of and path.stat().st_mode & 0o777 == 0o644


def test_without_a_gpu_there_is_no_line(folder):
    assert measured.reminder([]) == []


def test_another_version_is_not_this_one(folder, monkeypatch):
    measured.remember(GPU, "2026-11-25")
    monkeypatch.setattr(measured, "version", lambda: "99.0")
    assert measured.reminder([GPU]) == [LINE]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"NVIDIA H200": 3}'])
def test_a_broken_file_counts_as_none(folder, content):
    folder.mkdir()
    (folder / "measured.json").write_text(content)
    assert not measured.is_measured(GPU)
    measured.remember(GPU, "2026-11-25")
    assert measured.is_measured(GPU)


def test_without_a_home_folder(monkeypatch):
    for name in ("FUSEDOPS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert measured.reminder([GPU]) == [LINE]
    with pytest.raises(RuntimeError, match="FUSEDOPS_CACHE"):
        measured.remember(GPU, "2026-11-25")
