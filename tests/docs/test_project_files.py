"""GitHub's issue forms are valid, bug reports ask for the environment, and named commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KINDS = {"error", "feature", "slow", "wrong_result"}


def form(name):
    return yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())


def test_there_is_a_form_for_each_kind():
    assert {path.stem for path in FORMS} == KINDS | {"config"}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_form_is_valid(name):
    """GitHub ignores a form without these keys, or with an id twice."""
    fields = form(name)
    assert fields["name"] and fields["description"] and fields["labels"]
    assert {field["type"] for field in fields["body"]} == {"textarea"}
    assert all(field["attributes"]["label"] for field in fields["body"])
    ids = [field["id"] for field in fields["body"]]
    assert len(ids) == len({*ids})


@pytest.mark.parametrize("name", sorted(KINDS - {"feature"}))
def test_a_fault_needs_the_environment(name):
    needed = {f["id"] for f in form(name)["body"] if f.get("validations", {}).get("required")}
    labels = {field["id"]: field["attributes"]["label"] for field in form(name)["body"]}
    assert "info" in needed and labels["info"] == "`fusedops info`"


def test_commands_of_forms_exist():
    named = {w for path in FORMS for w in re.findall(r"`fusedops (\w+)", path.read_text())}
    named |= set(re.findall(r"`fusedops (\w+)", (ROOT / "SECURITY.md").read_text()))
    help_ = [sys.executable, "-m", "fusedops", "--help"]
    shown = subprocess.run(help_, capture_output=True, text=True, check=True).stdout
    assert {"info", "doctor", "bench", "profile"} <= named
    assert named <= set(re.findall(r"^    (\w+) ", shown, re.M))
