"""Writes or checks the pages' measured numbers and plots: `python -m benchmarks figures`."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import gpus, markers, page, plots, sweeps, typed
from benchmarks.figures.registry import NOTE, lookup
from benchmarks.figures.results import RESULTS, WARNING, FigureError, find

__all__ = ["run", "stale", "written"]

ROOT = Path(__file__).parents[2]
IMAGES = "docs/images"

# What is said of a stale result; whether it is stale changes with every edit of a kernel.
NOTES = re.compile(rf"; {WARNING}: [\w, -]+|\n\*{WARNING.capitalize()}[^\n]*\n")


def run(check: bool = False, current: bool = False, root: Path = ROOT) -> int:
    """Writes pages and plots. Returns 1 if a check failed or a figure could not be rendered.

    check: writes nothing, and fails if a page would change other than in what it says of stale
    results. current: writes nothing, and fails if a result that a page shows is stale.
    """
    results = root / RESULTS.relative_to(ROOT)
    try:
        if current:
            return _current(root, results)
        return _check(root, results) if check else _write(root, results)
    except FigureError as error:
        print(error, file=sys.stderr)
        return 1


def written(root: Path, results: Path) -> dict[str, str]:
    """Returns every page with figures as it should be, by path. Raises FigureError."""
    swept = sweeps.page(find(sweeps.STEMS, results)[0], sweeps.memory(results))
    whole = page.pages(results) | {sweeps.PAGE: swept}
    inline = {path: markers.filled(text, path, results) for path, text in typed.pages(root).items()}
    return whole | inline


def stale(root: Path, results: Path) -> Iterator[Path]:
    """The stale results behind the figures of all pages."""
    shown = {name for text in typed.pages(root).values() for name in markers.used(text)}
    files = [lookup(name).result(results) for name in shown - {NOTE}]
    stems = [subject.stems for subject in page.SUBJECTS.values()]
    files += [find(names, results)[0] for names in (*stems, sweeps.STEMS)]
    files += filter(None, [sweeps.memory(results)])
    found = {file.name: file for file in files}
    yield from (file.path for _, file in sorted(found.items()) if file.stale)
    yield from (path for path, document in gpus.complete(results) if gpus.stale(document))


def _write(root: Path, results: Path) -> int:
    for path, text in written(root, results).items():
        _replace(root / path, text)
    for name, values in plots.data(results).items():
        for theme in plots.THEMES:
            path = root / IMAGES / f"{name}-{theme}.svg"
            if not path.exists() or not plots.digest_in(path.read_text(), values):
                _replace(path, plots.drawn(values, theme))
    return 0


def _replace(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path}")


def _check(root: Path, results: Path) -> int:
    failed = list(_differences(root, results))
    for what in failed:
        print(f"{what} is not what `python -m benchmarks figures` writes", file=sys.stderr)
    return int(bool(failed))


def _differences(root: Path, results: Path) -> Iterator[str]:
    for path, text in written(root, results).items():
        now = (root / path).read_text() if (root / path).exists() else ""
        if _settled(now) != _settled(text):
            lines = zip(_settled(now).splitlines(), _settled(text).splitlines(), strict=False)
            first = next((i + 1 for i, (a, b) in enumerate(lines) if a != b), 0)
            yield f"{path}, near line {first}," if first else path
    for name, values in plots.data(results).items():
        for theme in plots.THEMES:
            path = root / IMAGES / f"{name}-{theme}.svg"
            if not path.exists() or not plots.digest_in(path.read_text(), values):
                yield str(path.relative_to(root))


def _settled(text: str) -> str:
    return NOTES.sub("", text)


def _current(root: Path, results: Path) -> int:
    found = list(stale(root, results))
    if not found:
        return 0
    print(f"Pages show these results, which were {WARNING}:", file=sys.stderr)
    for path in found:
        document = json.loads(path.read_text())
        where = document.get("environment", document)
        when = f"{where['device']}, {where['date'][:10]}, commit {where['commit']}"
        print(f"  {path.relative_to(root)}: {when}", file=sys.stderr)
    print(
        f"{len(found)} results are out of date. Measure them with `make figures` (a GPU's with"
        " `make gpu`), commit what it writes, and repeat this command.",
        file=sys.stderr,
    )
    return 1
