"""Ranks of a process group: processes over gloo, or threads of one process without it."""

import faulthandler
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist


@contextmanager
def group(rank: str | int, ranks: str | int, meeting: str | Path) -> Iterator[None]:
    """Joins the gloo group of `ranks` processes, whose file is `meeting`. Then ends this process.

    An exception ends it as usual: with a traceback and another status than 0. The other ranks then
    get an error from the closed connection. gloo's own timeout is longer than a test waits, so that
    a test that gives up still finds every rank where it hangs (see `children.forked`).
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{meeting}",
        timeout=timedelta(minutes=15),
        rank=int(rank),
        world_size=int(ranks),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # now and then a thread of torch's is still there, and ends the process by an abort


def in_threads(ranks: int, work: Callable[[int], None], limit: float = 120) -> None:
    """Calls work(rank) in `ranks` threads, over torch's process group for threads.

    Raises a rank's exception, which ends the others. Threads that wait for each other after `limit`
    seconds are ended, and their stacks are printed. Random numbers and settings of the process are
    the same for all ranks.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store, errors = dist.HashStore(), []

    def run(rank: int) -> None:
        try:
            if not dist.is_initialized():
                dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            work(rank)
        except SystemExit:  # the others' end, after an exception
            pass
        except BaseException as error:  # noqa: BLE001  raised again by the main thread
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    # From torch 2.13 on, threads may not propagate shardings at once.
    lock = mock.patch.object(ShardingPropagator, "_fake_mode_lock", threading.Lock(), create=True)
    with lock, _world_of_threads(threaded):
        running = [thread.submit(run, rank) for rank, thread in enumerate(_threads(ranks))]
        if wait(running, limit).not_done:
            faulthandler.dump_traceback(2, all_threads=True)
            hung = TimeoutError(f"ranks still wait after {limit} s; stderr has their stacks")
            errors.append(hung)
            threaded.ProcessLocalGroup.exception_handle(hung)
            wait(running, 10)
    if errors:
        _threads.cache_clear()  # some ranks may have created groups that others have not
        raise errors[0]


@functools.cache
def _threads(ranks: int) -> list[ThreadPoolExecutor]:
    """A thread for each rank, which runs this rank and keeps its process groups in later calls.

    torch's caches tell meshes of several ranks by the number of their thread. So a thread never
    ends: the system would give its number to a thread that runs another rank.
    """
    threads = [ThreadPoolExecutor(1) for _ in range(ranks)]
    _every_thread.extend(threads)
    return threads


_every_thread: list[ThreadPoolExecutor] = []


@contextmanager
def _world_of_threads(threaded) -> Iterator[None]:
    """Gives each thread its own process groups."""
    threaded.ProcessLocalGroup.reset()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
