"""A context manager that joins a rank's process group, and ends the process afterwards."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def group(rank: str | int, ranks: str | int, meeting: str | Path) -> Iterator[None]:
    """Joins the gloo group of `ranks` processes, whose file is `meeting`. Then ends this process.

    An exception ends it as usual: with a traceback and another status than 0.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{meeting}",
        timeout=timedelta(minutes=2),  # ends ranks that wait for one that raised an exception
        rank=int(rank),
        world_size=int(ranks),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # now and then a thread of torch's is still there, and ends the process by an abort
