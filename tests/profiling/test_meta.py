"""The memory planner's cached results of operators on meta tensors equal uncached ones."""

import torch

from fusedops.profiling.planning.meta import Tracker


def traced(run):
    """The results of the same calls three times in a tracker, and without one."""
    x = torch.empty(3, 4, dtype=torch.int32, device="meta")
    with Tracker() as tracker:
        found = [run(x) for _ in range(3)]
    return found, run(x), tracker


def test_results_are_those_of_the_operators():
    """Numbers that are equal and of different types give different dtypes."""
    for run in (
        lambda x: (x * 2, x * 2.0, x * True),
        lambda x: (x.mT + x.mT, x + x, x.sum(0), x.sum(0, keepdim=True)),
        lambda x: x.float().max(0),
        lambda x: x.float().to(torch.bfloat16).split(2, 1),
    ):
        found, wanted, _ = traced(run)
        for results in found:
            for result, one in zip(results, wanted, strict=True):
                assert result.dtype == one.dtype and result.device == one.device
                assert result.shape == one.shape and result.stride() == one.stride()


def test_each_result_has_its_own_memory_and_views_share_it():
    found, _, tracker = traced(lambda x: (y := x + 1, y.view(-1), y.mul_(2)))
    storages = [t.untyped_storage()._cdata for results in found for t in results]
    assert len(set(storages)) == 3 and storages == sorted(storages, key=storages.index)
    assert [storages[3 * i] for i in range(3)] == [storages[3 * i + 2] for i in range(3)]
    assert [life.bytes for life in tracker.lives] == [48, 48, 48]
