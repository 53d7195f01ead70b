"""`python -m checks families`: a tiny model of every family of transformers, patched and judged.

Each model is built with random weights from a config that is made small by the names of its
attributes, run, patched with all that patch has, run again, and unpatched. Outputs, loss, the
logits of generated tokens and all gradients are held to what `patch(verify=...)` holds them to;
after unpatch all bits, classes and names have to be those from before.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from checks.families import sweep, table
from checks.families.families import KINDS
from checks.families.judge import Row

__all__ = ["KINDS", "SECONDS", "run"]

SECONDS = 120.0


def run(
    names: Sequence[str] = (),
    kinds: Sequence[str] = (),
    json: str | Path | None = None,
    markdown: str | Path | None = None,
    seconds: float = SECONDS,
    again: bool = False,
) -> bool:
    """Judges the families, prints each, and writes the tables. True where none is wrong.

    names: families, all by default. kinds: of `families.KINDS`, all by default. json: a file that
    gets every row; those that it has are not judged again, unless `again`. markdown: a file that
    gets the table. seconds: for one family, whose process is ended after that.
    Raises ValueError for a family that there is not.
    """
    if find_spec("transformers") is None:
        raise ModuleNotFoundError("families needs transformers: pip install 'fusedops[hf]'")
    pairs = sweep.wanted(names, kinds)
    file = None if json is None else Path(json)
    rows = sweep.sweep(pairs, file, seconds, again, _tell)
    if markdown is not None:
        Path(markdown).write_text(table.markdown(list(rows.values()), sweep.versions()))
    mine = [row for row in rows.values() if (row["kind"], row["family"]) in set(pairs)]
    print(table.summary(mine))
    return table.all_right(mine)


def _tell(row: Row, done: int, of: int) -> None:
    print(f"{done:4} of {of}  {table.line(row)}", flush=True)
