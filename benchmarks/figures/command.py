"""Writes or checks the pages' measured numbers and plots: `python -m benchmarks figures`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import markers, page, plots, sweeps, typed
from benchmarks.figures.results import RESULTS, FigureError, find

__all__ = ["run", "written"]

ROOT = Path(__file__).parents[2]
IMAGES = "docs/images"


def run(check: bool = False, root: Path = ROOT) -> int:
    """Writes pages and plots. Returns 1 if a check failed or a figure could not be rendered.

    check: writes nothing, and fails if a page or a plot would change.
    """
    results = root / RESULTS.relative_to(ROOT)
    try:
        return _check(root, results) if check else _write(root, results)
    except FigureError as error:
        print(error, file=sys.stderr)
        return 1


def written(root: Path, results: Path) -> dict[str, str]:
    """Returns every page with figures as it should be, by path. Raises FigureError."""
    whole = page.pages(results) | {sweeps.PAGE: sweeps.page(find(sweeps.STEM, results)[0])}
    inline = {path: markers.filled(text, path, results) for path, text in typed.pages(root).items()}
    return whole | inline


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
        if now != text:
            lines = zip(now.splitlines(), text.splitlines(), strict=False)
            first = next((i + 1 for i, (a, b) in enumerate(lines) if a != b), 0)
            yield f"{path}, near line {first}," if first else path
    for name, values in plots.data(results).items():
        for theme in plots.THEMES:
            path = root / IMAGES / f"{name}-{theme}.svg"
            if not path.exists() or not plots.digest_in(path.read_text(), values):
                yield str(path.relative_to(root))
