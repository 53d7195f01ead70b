"""patch's report: a table with one `Site` per location in the model."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["PatchReport", "Site"]

INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")  # a layer's number; the 1 in `ln_1` is not one


@dataclass(frozen=True)
class Site:
    """One location in a model: what was there, and what runs now or why it was skipped.

    path: the module's name in the model. kind: "norm", "residual", "mlp", "linear", "rotary",
    "loss", "attention" or "quantize". was: the class (for attention, with the implementation) or
    the source line. now: the fused function, empty if the site was skipped. reason: why it was
    skipped, or a remark.
    """

    path: str
    kind: str
    was: str
    now: str = ""
    reason: str = ""


@dataclass
class PatchReport:
    """All sites that patch considered. `print(report)` shows a table.

    fused: the sites that run a fused function. skipped: the unchanged sites, with reasons. notes:
    remarks on several sites, such as how to read the logits.
    """

    fused: list[Site] = field(default_factory=list)
    skipped: list[Site] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def coverage(self) -> dict[str, tuple[int, int]]:
        """kind -> (sites fused, sites found)."""
        kinds = dict.fromkeys(site.kind for site in [*self.fused, *self.skipped])
        return {kind: self._count(kind) for kind in kinds}

    def _count(self, kind: str) -> tuple[int, int]:
        fused = sum(site.kind == kind for site in self.fused)
        return fused, fused + sum(site.kind == kind for site in self.skipped)

    def __str__(self) -> str:
        heads = [f"{kind}: {n} of {found} fused" for kind, (n, found) in self.coverage.items()]
        rows = [_row(paths, site) for paths, site in _fold(self.fused)]
        rows += [_row(paths, site) for paths, site in _fold(self.skipped)]
        head = "fusedops.patch  " + (", ".join(heads) or "no site found")
        return "\n".join([head, *_table(rows), *self.notes])


def _row(path: str, site: Site) -> tuple[str, str, str, str]:
    now = site.now or "skipped"
    return site.kind, path, site.was, f"{now}: {site.reason}" if site.reason else now


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    if not rows:
        return []
    rows = [("kind", "path", "was", "now"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in [lines[0], "-" * len(lines[0]), *lines[1:]]]


def _fold(sites: Iterable[Site]) -> list[tuple[str, Site]]:
    """Merges sites that differ only in their paths' numbers into one row: `layers.0-31.norm`."""
    groups: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        key = (INDEX.sub("#", site.path), site.kind, site.was, site.now, site.reason)
        groups.setdefault(key, []).append(site)
    return [
        (path, same[0])
        for (template, *_), same in groups.items()
        for path in _ranges(template, sorted({_numbers(site.path) for site in same}))
    ]


def _numbers(path: str) -> tuple[int, ...]:
    return tuple(int(n) for n in INDEX.findall(path))


def _ranges(template: str, rows: list[tuple[int, ...]]) -> list[str]:
    """One path if the numbers form a full grid; else one per first number, recursively."""
    columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
    if math.prod(map(len, columns)) == len(rows):
        return [_fill(template, map(_span, columns))]
    at = next(i for i, column in enumerate(columns) if len(column) > 1)
    split = ([row for row in rows if row[at] == first] for first in columns[at])
    return [path for part in split for path in _ranges(template, part)]


def _fill(template: str, texts: Iterable[str]) -> str:
    following = iter(texts)
    return re.sub("#", lambda _: next(following), template)


def _span(values: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
