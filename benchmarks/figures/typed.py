"""Finds hand-typed measurements in Markdown pages: numbers with units, and tables of numbers."""

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures.markers import MARKER

__all__ = ["GENERATED", "pages", "typed"]

# Pages that a command writes whole.
GENERATED = (
    "docs/benchmarks*.md",
    "docs/compatibility.md",
    "docs/coverage.md",
    "docs/machine_code.md",
    "docs/profile_*.md",
    "docs/sweep_*.md",
)

UNIT = r"x|ms|us|µs|GB/s|MB|MiB|[GT]FLOP/s|tokens/s|%"
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
# "8 ms", "1.2x", "3 to 4 ms"; not "16x16", and not the product "4096 x 4096".
FIGURE = re.compile(rf"(?<![\w.])({NUMBER}(?:x|\s?(?!x)(?:{UNIT})))(?![\w/])")

# A table with decimal numbers, whose unit a heading or a sentence has.
BARE = re.compile(r"^[ >]*\|.*\| *[+-]?\d+\.\d+ *(?:[,;|].*)?\|?\s*$")
TABLE = "a table of numbers"

FENCED = re.compile(r"^[ >]*(```|~~~).*?^[ >]*\1", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"``[^\n]+?``|`[^`\n]+`|<!--.*?-->|\]\([^)\n]*\)", re.DOTALL)


def typed(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each figure that no marker holds, and of each table of numbers."""
    for hide in (FENCED, MARKER, HIDDEN):
        text = hide.sub(_newlines, text)
    bare = [i for i, line in enumerate(text.splitlines(), 1) if BARE.match(line)]
    yield from ((i, TABLE) for i in bare if i - 1 not in bare)
    for match in FIGURE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[1].split())


def _newlines(match: re.Match) -> str:
    return " " + "\n" * match[0].count("\n") + " "


def pages(root: Path) -> dict[str, str]:
    """Returns README and the hand-written pages of docs, by path."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    generated = {path for pattern in GENERATED for path in root.glob(pattern)}
    return {str(p.relative_to(root)): p.read_text() for p in paths if p not in generated}
