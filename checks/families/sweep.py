"""Checks model families one after another, each in its own process.

If a process dies or takes too long, that is the family's verdict. Rows are written after each
family, so that an interrupted sweep continues where it stopped.
"""

import json
import multiprocessing
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checks.families.families import KINDS, families
from checks.families.judge import Row
from checks.families.judge import judge as judge_patch

__all__ = ["DIED", "TOO_LONG", "alone", "key", "sweep", "versions", "wanted"]

DIED, TOO_LONG = "died", "timeout"
# Modules that each family's process starts with.
PRELOADED = ["torch", "checks.families.judge", "transformers.modeling_utils"]
PRELOADED += ["transformers.generation", "transformers.models.auto.modeling_auto"]

Rows = dict[str, Row]
Judge = Callable[[str, str], Row]
Work = Callable[[Connection, str, str], None]


def wanted(names: Iterable[str], kinds: Iterable[str]) -> list[tuple[str, str]]:
    """(kind, family) for the named families, in each given kind; all without names."""
    names, kinds = list(names), list(kinds) or list(KINDS)
    pairs = [(kind, family) for kind in kinds for family in families(kind)]
    if unknown := set(names) - {family for _, family in pairs}:
        raise ValueError(f"families: no {' or '.join(kinds)} family {', '.join(sorted(unknown))}")
    return [pair for pair in pairs if not names or pair[1] in names]


def sweep(
    pairs: Iterable[tuple[str, str]],
    file: Path | None,
    seconds: float,
    again: bool = False,
    seen: Callable[[Row, int, int], object] = lambda row, done, of: None,
    judge: Judge = judge_patch,
) -> Rows:
    """Returns the rows of `pairs` plus those already in the file, which is updated.

    again: also check families that the file already has. seen: called with each new row, its number
    and the number of pairs. judge: returns a row.
    """
    rows, pairs = _read(file), list(pairs)
    left = [pair for pair in pairs if again or key(*pair) not in rows]
    for i, pair in enumerate(left, 1 + len(pairs) - len(left)):
        row = rows[key(*pair)] = alone(*pair, seconds, partial(_work, judge=judge))
        _write(file, rows)
        seen(row, i, len(pairs))
    return rows


def key(kind: str, family: str) -> str:
    return f"{kind}/{family}"


def alone(kind: str, family: str, seconds: float, work: Work) -> Row:
    """Returns one family's row, from its own process, which runs `work`."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs, kind, family), daemon=True)
    process.start()
    theirs.close()
    row: Row = {"kind": kind, "family": family}
    try:
        if ours.poll(seconds):
            return ours.recv()
        process.kill()
        row |= {"verdict": TOO_LONG, "why": f"more than {seconds:g} seconds"}
    except EOFError:
        process.join()
        row |= {"verdict": DIED, "why": f"its process exited with code {process.exitcode}"}
    finally:
        process.join(seconds)
    return row


def _work(to: Connection, kind: str, family: str, judge: Judge) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)  # makes results independent of other load
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    to.send(judge(kind, family))


def _read(file: Path | None) -> Rows:
    """Returns the file's rows, if they are for the installed versions."""
    held = json.loads(file.read_text()) if file is not None and file.exists() else {}
    rows = held["rows"] if held.get("versions") == versions() else []
    return {key(row["kind"], row["family"]): row for row in rows}


def _write(file: Path | None, rows: Rows) -> None:
    """Writes one row per line, so that a diff shows which rows changed."""
    if file is None:
        return
    lines = ",\n".join(json.dumps(rows[name], sort_keys=True) for name in sorted(rows))
    new = file.with_name(f"{file.name}.new")
    new.write_text(f'{{"versions": {json.dumps(versions())},\n"rows": [\n{lines}\n]}}\n')
    new.replace(file)


def versions() -> dict[str, str]:
    """Returns the versions that the rows are for."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}
