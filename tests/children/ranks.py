"""Ranks of a process group: processes over gloo, or threads of one process without it."""

import faulthandler
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
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

    Raises a rank's exception, which ends the others. After `limit` seconds, prints the stacks and
    ends the ranks that wait for each other. A rank that hangs elsewhere stays there until Python
    ends. Random numbers and settings of the process are the same for all ranks.
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
        running: list[Future] = [Future() for _ in range(ranks)]
        for rank, calls in enumerate(_threads(ranks)):
            calls.put((running[rank], run, rank))
        if wait(running, limit).not_done:
            faulthandler.dump_traceback(2, all_threads=True)
            hung = TimeoutError(f"ranks still wait after {limit} s; stderr has their stacks")
            errors.append(hung)
            threaded.ProcessLocalGroup.exception_handle(hung)
            wait(running, min(10, limit))
    if errors:
        _threads.cache_clear()  # some ranks may have created groups that others have not
        raise errors[0]


@functools.cache
def _threads(ranks: int) -> list[SimpleQueue]:
    """The calls of a thread for each rank, which keeps its process groups in later calls.

    torch's caches tell meshes of several ranks by the number of their thread. So a thread never
    ends: the system would give its number to a thread that runs another rank. The threads are
    daemons, for which Python does not wait when it ends.
    """
    queues: list[SimpleQueue] = [SimpleQueue() for _ in range(ranks)]
    for calls in queues:
        threading.Thread(target=_run_calls, args=[calls], daemon=True).start()
    return queues


def _run_calls(calls: SimpleQueue) -> None:
    while True:
        done, run, rank = calls.get()
        try:
            run(rank)
        finally:
            done.set_result(None)


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
