"""Formats the results of the model-family checks as lines, a summary and a Markdown page."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from checks.families.families import KINDS
from checks.families.judge import RIGHT, UNBUILT, UNKNOWN, UNRUN, Row
from fusedops.patching.core.kinds import SITE_NAMES

__all__ = ["all_right", "line", "markdown", "summary", "verdicts"]


def line(row: Row) -> str:
    """Returns the line printed when a family is done."""
    seconds = f" {row['seconds']} s" if "seconds" in row else ""
    why = f": {row['why']}" if row.get("why") else ""
    return f"{row['kind']} {row['family']}{seconds}  {row['verdict']}{why}"


def all_right(rows: Iterable[Row]) -> bool:
    """Whether there are right families, and none that was built is wrong."""
    given = {row["verdict"] for row in rows}
    return RIGHT in given and given <= {RIGHT, UNBUILT, UNRUN, UNKNOWN}


def verdicts(rows: Sequence[Row]) -> str:
    """Returns how many families have each verdict, on one line."""
    counts = Counter(row["verdict"] for row in rows).most_common()
    return f"{len(rows)} families: {', '.join(f'{n} {verdict}' for verdict, n in counts)}"


def summary(rows: Sequence[Row]) -> str:
    """Returns one line per kind: how many were built, are right, and have which sites fused."""
    parts = [[row for row in rows if row["kind"] == kind] for kind in KINDS]
    return "\n".join(_counts(part) for part in parts if part)


def _counts(rows: list[Row]) -> str:
    verdicts = Counter(row["verdict"] for row in rows)
    ran = [row for row in rows if "fused" in row]
    listed = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common())
    sites = ", ".join(f"{site} {_families_with(ran, site)}" for site in SITE_NAMES)
    return f"{rows[0]['kind']}: {len(rows)} families: {listed}; fused where present: {sites}"


def _families_with(rows: Iterable[Row], site: str) -> str:
    have = [row for row in rows if row["found"].get(site)]
    return f"{sum(bool(row['fused'].get(site)) for row in have)}/{len(have)}"


HEAD = """\
# Families of transformers

`make coverage` writes this file. For every family it shrinks the default config to a tiny model
with random weights, runs it in float32, patches it with all of `patch`'s defaults, runs it again
and unpatches it. A family is right if every output, the loss, the logits of generated tokens and
all gradients are as close to a float64 run as rounding allows (`patch(verify=...)`'s criterion),
and if `unpatch` restores every bit, class and name. Size thresholds are switched off, so that these
tiny models run the fused kernels.

In the first table, a site's column gives two numbers: the families that fuse it and the families
that have it. In the other tables, it gives the sites that are fused and the sites that were found.
A family is "not built" if transformers cannot build a model with our sizes or needs a package that
is not installed. It is "not run" if it accepts none of our inputs or fails without the patch too.
Skipped norms are batch norms, gated norms and others that are neither `layer_norm` nor `rms_norm`.
"""


def markdown(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """Returns the page: a summary, and a table of families for each kind.

    versions: torch's and transformers', by name.
    """
    parts = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    parts = {kind: part for kind, part in parts.items() if part}
    listed = " and ".join(f"{name} {version}" for name, version in versions.items())
    text = [HEAD, f"Generated with {listed}.\n", _summary_table(parts)]
    for kind, part in parts.items():
        text += [f"\n## {kind}\n", _table(sorted(part, key=lambda row: row["family"]))]
        text += _absent(part)
    return "\n".join(text).rstrip() + "\n"


def _summary_table(parts: dict[str, list[Row]]) -> str:
    lines = ["| kind | families | built | right | " + " | ".join(SITE_NAMES) + " |"]
    lines.append("| --- " * (4 + len(SITE_NAMES)) + "|")
    for kind, rows in parts.items():
        ran = [row for row in rows if "fused" in row]
        right = sum(row["verdict"] == RIGHT for row in rows)
        sites = " | ".join(_families_with(ran, site) for site in SITE_NAMES)
        lines.append(f"| {kind} | {len(rows)} | {len(ran)} | {right} | {sites} |")
    return "\n".join(lines)


def _table(rows: list[Row]) -> str:
    lines = ["| family | verdict | " + " | ".join(SITE_NAMES) + " | skipped, and why |"]
    lines.append("| --- " * (3 + len(SITE_NAMES)) + "|")
    lines += [_row(row) for row in rows if row["verdict"] not in (UNBUILT, UNRUN)]
    return "\n".join(lines)


def _row(row: Row) -> str:
    sites, fused = row.get("found", {}), row.get("fused", {})
    cells = [f"{fused[site]}/{sites[site]}" if sites.get(site) else "" for site in SITE_NAMES]
    reasons = dict.fromkeys(f"{kind}: {reason}" for kind, reason, _ in row.get("skipped", ()))
    verdict = row["verdict"] if row["verdict"] == RIGHT else f"{row['verdict']}: {row['why']}"
    notes = "; ".join([*_remarks(row), *reasons])
    return "| " + " | ".join(_cell(c) for c in [row["family"], verdict, *cells, notes]) + " |"


def _remarks(row: Row) -> list[str]:
    remarks = ["draws random numbers in eval mode"] if row.get("random") else []
    remarks += ["run with text only"] if row.get("text alone") else []
    remarks += ["compared in float32 only"] if row.get("float64") is False else []
    if "not run" in row.get("generate", ""):
        remarks.append("generate " + row["generate"])
    if row.get("slack", 0) > 0.01:
        remarks.append(f"rounding alone moves a result by {row['slack']:.0e}")
    return remarks


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _absent(rows: list[Row]) -> list[str]:
    lines = []
    for verdict in (UNBUILT, UNRUN):
        absent = [row for row in rows if row["verdict"] == verdict]
        if absent:
            lines.append(f"\n{verdict.capitalize()}:\n")
            lines += [f"- {row['family']}: {row['why']}" for row in absent]
    return lines
