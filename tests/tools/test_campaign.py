"""`make figures` runs each benchmark job once, resumes, and says why it measures again."""

import copy
import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.figures import campaign, page
from benchmarks.figures.registry import FIGURES
from benchmarks.figures.results import folder_here, folder_of
from benchmarks.harness import report


def asked(*jobs, out, **options):
    return Namespace(jobs=list(jobs), out=str(out), again=False, list=False, **options)


def test_campaign_resumes(tmp_path, monkeypatch, capsys):
    ran = []

    def measured(job, path):
        ran.append(job.name)
        where = {"torch": campaign.torch.__version__, **report.stamp()}
        path.write_text(report.dump({"environment": where, "rows": [], "goals": []}))
        return job.name != "launch"

    monkeypatch.setattr(campaign, "_measured", measured)
    assert campaign.run(asked("adamw", "small", out=tmp_path)) == 0
    assert campaign.run(asked("adamw", "small", "demo", out=tmp_path)) == 0
    assert ran == ["adamw", "small", "demo"]
    assert "adamw: current, kept" in capsys.readouterr().out
    assert campaign.run(asked("launch", out=tmp_path)) == 1
    assert "no result of: launch" in capsys.readouterr().err


def test_campaign_keeps_the_earlier_file_of_a_job_that_fails(tmp_path, monkeypatch):
    ran = []

    def fails(command, env, **_):
        ran.append((command[2:], env.get("FUSEDOPS_CPU_ISA")))

    def demo(command, **_):
        Path(command[-1], "demo.json").write_text(json.dumps({"ratio": 1.0}))

    path = tmp_path / "few-rows-without-amx.json"
    path.write_text("{}")
    monkeypatch.setattr(campaign.subprocess, "run", fails)
    assert not campaign._measured(campaign.JOBS["few-rows-without-amx"], path)
    assert path.read_text() == "{}" and ran[0][1] == "avx512_bf16"
    assert ran[0][0][:3] == ["benchmarks", "few-rows", "--seconds"] and "--json" in ran[0][0]
    monkeypatch.setattr(campaign.subprocess, "run", demo)
    assert campaign._measured(campaign.JOBS["demo"], path)
    written = json.loads(path.read_text())
    assert written == {"ratio": 1.0, **report.stamp()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"cpu": "another"}, "measured with cpu another"),
        ({"torch": "1.0"}, "measured with torch 1.0"),
        ({"fusedops": "0.0.1"}, "measured with fusedops 0.0.1"),
    ],
)
def test_campaign_says_why_it_measures(tmp_path, change, reason):
    path = tmp_path / "a.json"
    assert campaign.reason(path) == "not measured on this CPU"
    where = {"torch": campaign.torch.__version__, **report.stamp()} | copy.copy(change)
    path.write_text(json.dumps({"environment": where}))
    assert campaign.reason(path) == reason
    path.write_text(json.dumps({"environment": {"torch": "1"}}))
    assert campaign.reason(path) == "measured with cpu unknown"


def test_campaign_measures_what_the_pages_show_and_in_time():
    assert sum(job.minutes for job in campaign.JOBS.values()) < 180
    shown = {subject.stem for subject in page.SUBJECTS.values()}
    shown |= {figure.stem for figure in FIGURES.values()}
    assert not shown - set(campaign.JOBS)
    with pytest.raises(SystemExit, match="no job nothing; there are must-show-"):
        campaign.run(asked("nothing", out="."))
    assert [folder_of(name) for name in ("Intel(R) Xeon(R) Processor", "AMD EPYC")] == [
        "intel-xeon",
        "amd-epyc",
    ]


def test_a_cpu_of_the_same_name_has_a_folder_of_its_own(tmp_path, monkeypatch):
    """Cloud machines call three generations AMD EPYC."""
    for numbers in ("family 25, model 1", "family 26, model 2"):
        cpu = f"AMD EPYC, {numbers}, stepping 1"
        monkeypatch.setattr(report, "cpu", lambda cpu=cpu: cpu)
        assert folder_here(tmp_path).name == folder_of(f"AMD EPYC, {numbers}")
    assert folder_of("AMD EPYC, family 26, model 2") == "amd-epyc-family-26-model-2"
