"""The table of site kinds is what patch's arguments, docstring and guide say."""

import inspect
import re
from pathlib import Path

from fusedops.backends import FAMILIES
from fusedops.patching import patch
from fusedops.patching.core.kinds import SITE_KINDS, SITE_NAMES, only

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "patch.md"
NO_KINDS = {"strict", "verify"}  # patch's other arguments


def test_each_kind_is_an_argument_of_patch_with_its_default():
    arguments = inspect.signature(patch).parameters.values()
    named = {a.name: a.default for a in arguments if a.kind is a.KEYWORD_ONLY}
    kinds = {kind.name: kind.default for kind in SITE_KINDS}
    assert {name: named[name] for name in named.keys() - NO_KINDS} == kinds
    bullets = re.findall(r"^ *- (\w+): ", patch.__doc__, re.MULTILINE)
    assert set(bullets) - NO_KINDS == set(kinds)
    assert {kind.family for kind in SITE_KINDS} == set(FAMILIES) - {"adamw"}


def test_the_guide_has_a_row_for_each_kind():
    table = GUIDE.read_text().partition("## What is fused")[2].partition("\n\nA norm")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    sentences = {row[0]: row[1] for row in rows[4:] if row}
    assert sentences == {k.name: k.looks_for for k in SITE_KINDS if k.name in SITE_NAMES}


def test_only_one_kind_is_left_on():
    assert only("norm", "loss").keys() == set(SITE_NAMES) - {"norm", "loss"}
    assert set(only("norm").values()) == {False} and set(only()) == set(SITE_NAMES)
