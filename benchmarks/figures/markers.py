"""Fills in the measured numbers between marker comments in a Markdown page.

`<!-- figure NAME -->1.32x<!-- /figure -->` shows a figure of `registry.py`; `NAME interval` adds
its 95 % interval. `<!-- figure note -->...<!-- /figure -->` says where and when the page's figures
were measured; each page with figures has one. GitHub and MkDocs hide the comments. They take a line
that begins with one for HTML, so none may.
"""

import re
from pathlib import Path

from benchmarks.figures.registry import NOTE, lookup
from benchmarks.figures.results import RESULTS, FigureError, Result

__all__ = ["MARKER", "filled", "used"]

END = "<!-- /figure -->"
MARKER = re.compile(
    r"(?P<start><!-- figure (?P<name>[^\s>]+)(?P<interval> interval)? -->)"
    r"(?P<shown>[^\n]*?)" + re.escape(END)
)
OPENING = re.compile(r"<!--\s*/?\s*figure\b[^\n]*?(?:-->|$)", re.MULTILINE)
AT_START = re.compile(r"^\s*(?:(?:[-*+>]|\d+\.)\s+)*<!-- figure ")
FENCE = re.compile(r"^\s*(?:```|~~~)")
CODE = re.compile(r"`[^`\n]+`")


def filled(text: str, page: str, results: Path = RESULTS) -> str:
    """Returns the page with today's figures. Raises FigureError with page, line and reason."""
    lines = text.splitlines(keepends=True)
    prose = [i for i, line in _outside_fences(lines)]
    cited: dict[str, Result] = {}
    for i in prose:
        lines[i] = _line(lines[i], f"{page}:{i + 1}", cited, results)
    note = [i for i in prose if f"<!-- figure {NOTE} -->" in lines[i]]
    if cited and not note:
        raise FigureError(f"{page}: a page with figures needs <!-- figure {NOTE} -->{END}")
    for i in note:
        lines[i] = MARKER.sub(lambda m: _noted(m, cited), lines[i])
    return "".join(lines)


def used(text: str) -> set[str]:
    """Returns the names of a page's figures."""
    lines = text.splitlines(keepends=True)
    return {m["name"] for _, line in _outside_fences(lines) for m in _markers(line)}


def _markers(line: str) -> list[re.Match]:
    """A line's markers; a marker inside code is text."""
    code = [match.span() for match in CODE.finditer(line)]
    inside = lambda m: any(a < m.start() and m.end() < b for a, b in code)  # noqa: E731
    return [match for match in MARKER.finditer(line) if not inside(match)]


def _line(line: str, where: str, cited: dict[str, Result], results: Path) -> str:
    markers = _markers(line)
    if not markers and not OPENING.search(CODE.sub("", line)):
        return line
    if len(OPENING.findall(CODE.sub("", line))) != 2 * len(markers):
        raise FigureError(f"{where}: expected <!-- figure NAME -->value{END} on one line")
    if AT_START.match(line):
        raise FigureError(f"{where}: a line must not begin with a figure's comment")
    for match in reversed(markers):
        shown = _shown(match, where, cited, results)
        line = f"{line[: match.start()]}{match['start']}{shown}{END}{line[match.end() :]}"
    return line


def _shown(match: re.Match, where: str, cited: dict[str, Result], results: Path) -> str:
    if match["name"] == NOTE:
        return match["shown"]
    try:
        figure = lookup(match["name"])
        file = figure.result(results)
        cited[file.name] = file
        return figure.text(bool(match["interval"]), results)
    except FigureError as error:
        raise FigureError(f"{where}: figure {match['name']}: {error}") from error


def _noted(match: re.Match, cited: dict[str, Result]) -> str:
    if match["name"] != NOTE:
        return match[0]
    return f"{match['start']}{_note(cited)}{END}"


def _note(cited: dict[str, Result]) -> str:
    """`AMD EPYC, 1 thread, torch 2.13: step (2026-11-23, commit `5ce6b3615038`)`, by machine."""
    machines: dict[str, list[str]] = {}
    for _, file in sorted(cited.items()):
        once = f"{file.path.stem} ({file.date}, commit `{file.commit}`)"
        machines.setdefault(file.machine, []).append(once)
    return "; ".join(f"{machine}: {', '.join(each)}" for machine, each in machines.items())


def _outside_fences(lines: list[str]) -> list[tuple[int, str]]:
    kept, inside = [], False
    for i, line in enumerate(lines):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append((i, line))
    return kept
