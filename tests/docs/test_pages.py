"""README and docs: Python blocks run, links work, public names are listed."""

import os
import re
from pathlib import Path

import pytest
from children import forked
from children.page_blocks import blocks
from markdown_it import MarkdownIt

import fusedops

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs/llms.txt", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINKING = sorted({*PAGES, *ROOT.glob("*.md")})
ALL = os.environ.get("FUSEDOPS_DOCS") == "all"  # make docs
SLOW = {"docs/guides/memory.md", "docs/guides/profile.md", "docs/guides/sweep.md"}
SLOW |= {"docs/guides/tune.md"}
LARGEST = {"README.md": 10 * 1024, "CONTRIBUTING.md": 9 * 1024}
LONGEST = 540  # seconds of a page's blocks while other programs use the CPUs

pytest.importorskip("transformers")


@pytest.mark.parametrize("page", [n for n, page in zip(NAMES, PAGES, strict=True) if blocks(page)])
def test_blocks(page, tmp_path):
    if (page in SLOW or page.startswith("docs/learn/")) and not ALL:
        pytest.skip("`make docs` runs the blocks that take minutes")
    script = str(ROOT / "tests" / "children" / "page_blocks.py")
    done = forked(script, str(ROOT / page), cwd=tmp_path).result(LONGEST)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def anchors(page):
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    words = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {word.strip().replace(" ", "-") for word in words}


def links(page):
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            yield from re.findall(r' (?:src|srcset|href)="([^":]+)"', token.content)
        for inline in token.children or ():
            target = inline.attrs.get("href") or inline.attrs.get("src")
            if target and "://" not in target:
                yield target


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    """Links lead to files and headings. A folder of docs/ would not be a page of the site."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert target.is_file() or ROOT / "docs" not in target.resolve().parents, link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", LARGEST)
def test_what_a_newcomer_reads_is_short(page):
    assert (ROOT / page).stat().st_size <= LARGEST[page]
    assert (ROOT / page).read_text().count("<picture>") == (page == "README.md")


def test_tests_that_pages_name_exist():
    """docs/design/patching.md, for one, names each mechanism's test."""
    files = [*(ROOT / "tests").rglob("*.py")]
    tests = {n for path in files for n in re.findall(r"def (test_\w+)", path.read_text())}
    tests |= {path.stem for path in files} | {"test_modeling_common"}  # transformers'
    named = {n for page in LINKING for n in re.findall(r"\btest_\w+", page.read_text())}
    assert len(named) > 20 and not named - tests


def test_the_reference_has_every_public_name():
    folder = ROOT / "docs" / "reference"
    shown = {
        name
        for page in folder.glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
    }
    rooms = {"fusedops": fusedops} | {
        f"fusedops.{room}": getattr(fusedops, room) for room in ("functional", "nn", "optim")
    }
    public = {f"{room}.{name}" for room, module in rooms.items() for name in module.__all__}
    elsewhere = {"fusedops.clip_grad_norm_"} | {*rooms}  # on functional's page
    assert public - elsewhere == {name for name in shown if ".integrations." not in name}


def test_errors_are_those_of_the_sources():
    """Each heading of errors.md quotes a message; `...` stands for what a call fills in."""
    files = (p for room in ("fusedops", "csrc") for p in (ROOT / room).rglob("*.*"))
    sources = "\n".join(p.read_text() for p in files if p.suffix in {".py", ".cpp", ".h"})
    page = (ROOT / "docs" / "errors.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.M)
    assert len(quoted) > 10
    for message in quoted:
        parts = map(re.escape, message.split("..."))
        assert re.search(r'[^\n"]*'.join(parts), sources), message
