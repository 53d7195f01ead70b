"""`python -m checks builds` compares two checkouts by the fastest time of each benchmark row."""

import json
from pathlib import Path

from checks import __main__ as command_line
from checks import builds
from checks.builds import ratios, summary

ROW = "fusedops module", "norm", "forward", (1, 64)
OTHER = "fusedops module", "norm", "training", (1, 64)


def test_a_row_compares_the_fastest_rounds():
    rounds = [({ROW: 1.0, OTHER: 1.0}, {ROW: 2.0}), ({ROW: 10.0}, {ROW: 1.1})]
    rounds.append(({ROW: 2.0}, {ROW: 3.0}))
    assert ratios(rounds) == {ROW: 1.1}


def test_a_slower_row_is_named_and_fails_as_does_a_slower_mean(monkeypatch, tmp_path, capsys):
    slow = {"fusedops": {ROW: 1.06, OTHER: 1.0}, "eager": {ROW: 1.0, OTHER: 1.0}}
    fast = {name: dict.fromkeys(rows, 1.0) for name, rows in slow.items()}
    here = builds.ROOT
    monkeypatch.setattr(builds, "times", lambda tree, *_: slow if tree == here else fast)
    path = tmp_path / "rows.json"
    command = ["builds", str(tmp_path), "--rounds", "2", "--json", str(path)]
    assert command_line.main(command) == 1
    document = json.loads(path.read_text())
    assert document["fusedops"]["slower"] == [
        {"row": "fusedops module: norm forward [1, 64]", "ratio": 1.06}
    ]
    assert document["fusedops"]["geometric_mean"] == 1.0296
    assert "  1.06 fusedops module: norm forward [1, 64]" in capsys.readouterr().out
    slow["fusedops"] = dict.fromkeys((ROW, OTHER), 1.04)  # no row, but the mean
    assert command_line.main(command) == 1
    slow["fusedops"] = {ROW: 1.06, OTHER: 0.9}  # a row, but not the mean
    assert command_line.main(command) == 1
    assert document["eager"] == {"rows": 2, "geometric_mean": 1.0, "slower": []}
    slow["fusedops"] = {ROW: 1.04, OTHER: 0.9}
    assert command_line.main(command) == 0
    assert summary({ROW: 1.04})["slower"] == [] and Path(path).exists()
