"""PatchReport, the table of what patch fused or skipped, and CallCounts, the table of calls."""

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

__all__ = ["CallCounts", "PatchReport", "Site", "SiteCalls"]

HEAD = "kind", "path", "was", "now"
CALLS_HEAD = (
    *("kind", "path", "now", "kernel", "torch", "backward kernel", "backward torch"),
    "why torch's code",
)
WITHIN = {"norm": "residual", "linear": "loss"}  # what calls such a site's function instead
UNCALLED = "not called by the batch of counts"
INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")  # a layer's number; the 1 in `ln_1` is not one


@dataclass(frozen=True)
class Site:
    """One location in a model: what was there, and what runs now or why that stays.

    path: the module's name in the model. kind: the name of patch's argument for such sites, or
    "activation" for one that stays apart from the linear before it. was: the class (for attention
    and experts, with the implementation), the source line, or a function of torch with the file and
    line that calls it. now: the fused function, empty if the site was skipped or kept. reason: why
    it was, or a remark. uncalled: the last batch of `PatchReport.counts` did not call it.
    """

    path: str
    kind: str
    was: str
    now: str = ""
    reason: str = ""
    uncalled: bool = False


@dataclass(frozen=True)
class SiteCalls:
    """How one fused site's calls ran, in one forward and backward.

    path, kind, now: as in `Site`. kernel: calls that ran a kernel. fallback: calls that ran torch's
    code; reasons: why, with the number of calls. backward_kernel, backward_fallback: the same for
    the backward of those calls, as far as it ran operators. A norm whose sum is fused with it is
    called as part of the residual site of the same path, and a head as part of its loss.
    """

    path: str
    kind: str
    now: str
    kernel: int = 0
    fallback: int = 0
    backward_kernel: int = 0
    backward_fallback: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CallCounts:
    """The calls of all fused sites. `print(counts)` shows a table.

    sites: in the report's order; sites of the same path and kind are one. In the table, layers with
    the same numbers are one row, whose numbers are each layer's.
    """

    sites: list[SiteCalls]

    @property
    def kernel(self) -> int:
        """Forward calls that ran a kernel."""
        return sum(site.kernel for site in self.sites)

    @property
    def fallback(self) -> int:
        """Forward calls that ran torch's code."""
        return sum(site.fallback for site in self.sites)

    @property
    def reasons(self) -> dict[str, int]:
        """Why calls ran torch's code: reason -> calls."""
        sums: dict[str, int] = {}
        for site in self.sites:
            for reason, calls in site.reasons.items():
                sums[reason] = sums.get(reason, 0) + calls
        return sums

    @property
    def uncalled(self) -> set[tuple[str, str]]:
        """(path, kind) of the sites that were neither called nor run within another site."""
        called = {(s.path, s.kind) for s in self.sites if any(_numbers_of(s))}
        sites = ((s.path, s.kind) for s in self.sites)
        return {
            (path, kind)
            for path, kind in sites
            if (path, kind) not in called and (path, WITHIN.get(kind, "")) not in called
        }

    def __str__(self) -> str:
        uncalled = self.uncalled
        rows = [_calls_row(path, site, uncalled) for path, site in _fold(self.sites, _calls_key)]
        head = f"fusedops.patch  {self.kernel} calls by kernels, {self.fallback} by torch's code"
        return "\n".join([head, *_table(rows, CALLS_HEAD)])


def _calls_key(site: SiteCalls) -> Hashable:
    return site.kind, site.now, *_numbers_of(site), *site.reasons.items()


def _numbers_of(site: SiteCalls) -> tuple[int, ...]:
    return site.kernel, site.fallback, site.backward_kernel, site.backward_fallback


def _calls_row(path: str, site: SiteCalls, uncalled: set[tuple[str, str]]) -> tuple[str, ...]:
    numbers = _numbers_of(site)
    notes = [f"{calls} x {reason}" for reason, calls in site.reasons.items()]
    if (site.path, site.kind) in uncalled:
        notes = ["not called"]
    elif not any(numbers):
        notes = [f"within its {WITHIN[site.kind]}"]
    return site.kind, path, site.now, *(str(n or "") for n in numbers), "; ".join(notes)


@dataclass
class PatchReport:
    """All sites that patch considered. `print(report)` shows a table, `report.summary` is one line.

    fused: the sites that run a fused function. skipped: the sites that could not be fused, with
    reasons. kept: what patch leaves as it is, with reasons: linears for which torch is as fast
    here, and calls in the model's own code of functions for which fusedops has a kernel but that
    patch does not replace there. notes: remarks on several sites, such as how to read the logits.
    """

    fused: list[Site] = field(default_factory=list)
    skipped: list[Site] = field(default_factory=list)
    kept: list[Site] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _counter: ClassVar[Callable[..., CallCounts] | None] = None  # an attribute of patch's reports

    def counts(self, batch: Any) -> CallCounts:
        """Calls per fused site in one forward and backward: by kernel or by torch's code, and why.

        batch: a dict of keyword arguments, a tuple or list of positional ones, or one tensor. The
        model runs in its current mode, on its `loss`, or on a weighted sum of its outputs without
        one. Afterwards parameters, gradients, buffers, modes and the generators of torch, Python
        and numpy are as before; this takes memory for a copy of the parameters and buffers. A call
        counts as a kernel's if a compiled or Triton kernel of ours ran in it. With activation
        checkpointing, a layer's second forward counts too; torch's reentrant form of it raises.
        Calls inside of a compiled graph and in other threads are not seen. Afterwards the report
        marks the sites that this batch did not call, such as those of a branch that never runs.

        Raises TypeError for another batch, RuntimeError if the model no longer exists, is no longer
        patched, or if the report is a copy or was not made by patch, and what the model raises.
        """
        if self._counter is None:
            raise RuntimeError("counts: needs the report that patch returned, not a copy")
        return self._counter(self, batch)

    def __getstate__(self) -> dict[str, Any]:
        """A copy does not know the model."""
        return {name: value for name, value in vars(self).items() if name != "_counter"}

    @property
    def coverage(self) -> dict[str, tuple[int, int]]:
        """(sites fused, sites found) by kind. A site that patch keeps as it is counts as found."""
        sites = [*self.fused, *self.skipped, *self.kept]
        fused, total = Counter(s.kind for s in self.fused), Counter(s.kind for s in sites)
        return {kind: (fused[kind], total[kind]) for kind in total}

    @property
    def summary(self) -> str:
        """One line: how many sites of each kind were fused, of how many found."""
        heads = [
            f"{kind}: {n} of {total} fused{self._remarks_on(kind)}"
            for kind, (n, total) in self.coverage.items()
        ]
        return "fusedops.patch  " + (", ".join(heads) or "no site found")

    def _remarks_on(self, kind: str) -> str:
        reasons = [site.reason for site in self.kept if site.kind == kind]
        why = f": {reasons[0]}" if len(set(reasons)) == 1 else ""
        uncalled = sum(s.kind == kind and s.uncalled for s in [*self.fused, *self.kept])
        remarks = [f"{len(reasons)} kept{why}"] if reasons else []
        remarks += [f"{uncalled} not called"] if uncalled else []
        return f" ({', '.join(remarks)})" if remarks else ""

    def __str__(self) -> str:
        groups = ("fused", self.fused), ("skipped", self.skipped), ("kept", self.kept)
        rows = [
            _row(paths, site, group)
            for group, sites in groups
            for paths, site in _fold(sites, _site_key)
        ]
        return "\n".join([self.summary, *_table(rows, HEAD), *self.notes])


def _site_key(site: Site) -> Hashable:
    return replace(site, path="")


def _row(path: str, site: Site, group: str) -> tuple[str, str, str, str]:
    remarks = filter(None, (site.reason, UNCALLED if site.uncalled else ""))
    return (
        site.kind,
        path,
        site.was,
        ": ".join(filter(None, (site.now or group, "; ".join(remarks)))),
    )


def _table(rows: Sequence[tuple[str, ...]], head: tuple[str, ...]) -> list[str]:
    if not rows:
        return []
    rows = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in [lines[0], "-" * len(lines[0]), *lines[1:]]]


class _HasPath(Protocol):
    @property
    def path(self) -> str: ...


One = TypeVar("One", bound=_HasPath)


def _fold(sites: Iterable[One], key: Callable[[One], Hashable]) -> list[tuple[str, One]]:
    """Merges sites that differ only in their paths' numbers into one row: `layers.0-31.norm`."""
    groups: dict[tuple[str, Hashable], list[One]] = {}
    for site in sites:
        groups.setdefault((INDEX.sub("#", site.path), key(site)), []).append(site)
    return [
        (path, same[0])
        for (template, _), same in groups.items()
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
