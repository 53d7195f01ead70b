"""pyproject.toml, CHANGELOG.md and CITATION.cff are valid and name the same version."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import fusedops

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.M)
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def citation(key):
    return re.search(rf"^{key}: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]


def test_every_place_names_the_same_version():
    version, date = RELEASE.search(CHANGELOG).groups()
    assert PROJECT["version"] == fusedops.__version__ == citation("version") == version
    assert citation("date-released") == date


def test_the_changelog_keeps_its_form():
    heads = re.findall(r"^## (.*)$", CHANGELOG, re.M)
    assert heads[0] == "[Unreleased]"
    releases = RELEASE.findall(CHANGELOG)
    assert len(releases) == len(heads) - 1
    newest_first = sorted(releases, key=lambda r: [*map(int, r[0].split("."))], reverse=True)
    assert releases == newest_first
    for part in re.split(r"^## .*$", CHANGELOG, flags=re.M)[1:]:
        kinds = re.findall(r"^### (.*)$", part, re.M)
        assert len(kinds) == len({*kinds}) and set(kinds) <= CHANGES
        assert not re.search(r"^### .*\n+(?!\n|- )", part, re.M), "a heading without entries"


def test_the_citation_is_valid():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]


def test_classifiers_and_dependencies():
    listed = [
        c for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python ::")
    ]
    minors = [c.rpartition(":: ")[2] for c in listed if "." in c]
    assert minors == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == f">={minors[0]}"
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "fusedops" / "py.typed").exists()
    names = [re.match(r"[\w-]+", need)[0] for need in PROJECT["dependencies"]]
    assert names == ["torch", "numpy", "ninja"]


def test_the_command_exists():
    module, _, name = PROJECT["scripts"]["fusedops"].partition(":")
    assert callable(getattr(import_module(module), name))


def test_extras_that_messages_and_extras_name_exist():
    folders = ROOT / "fusedops", ROOT / "checks"
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    texts += [need for extra in PROJECT["optional-dependencies"].values() for need in extra]
    named = [name for text in texts for name in re.findall(r"fusedops\[([\w,]+)\]", text)]
    assert len(named) > 4
    assert {e for name in named for e in name.split(",")} <= PROJECT["optional-dependencies"].keys()
