"""Shows a progress bar on stderr if that is a terminal and rich is installed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives a function that counts one step of `total`."""
    bar = _rich(title, total) if sys.stderr.isatty() else None
    if bar is None:
        yield lambda: None
        return
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _rich(title: str, total: int):
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        return None
    return Progress(console=Console(stderr=True), transient=True)
