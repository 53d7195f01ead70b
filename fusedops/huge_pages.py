"""Moves a model's weights into huge pages, where a processor reads large weights faster."""

import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["move_to_huge_pages"]

_HUGE = 2 << 20  # bytes of a huge page on x86
_ALIGNED = 64  # bytes; torch's own alignment on CPUs
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def move_to_huge_pages(model: nn.Module) -> str:
    """Copies the model's parameters and buffers on the CPU into pages of 2 MiB; says what it did.

    Linux gives a program pages of 4 KiB, and the processor's prefetching ends with each. Values,
    strides and tied weights stay, as do the tensor objects: an optimizer or a hook keeps its
    parameter. Addresses change, as with `model.to`. Some tensors are not moved: tensors on other
    devices, of subclasses, of inference mode, in shared memory, with gaps between elements, and
    tensors that partly overlap another tensor's memory. A tensor's old memory is freed before
    the next one moves, unless another tensor still uses it, such as a slice of one flat buffer. The
    new memory is freed with the last of the tensors.
    """
    groups = list(_movable([*model.parameters(), *model.buffers()]))
    sizes = [-(-group[0].nbytes // _ALIGNED) * _ALIGNED for group in groups]
    if sum(sizes) < _HUGE:
        return "weights of less than 2 MiB stay where they are"
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return "this system has no huge pages to ask for"
    try:
        memory = mmap.mmap(-1, sum(sizes) + 2 * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        return f"the weights are not in huge pages: {error}"
    first = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    place = -first % _HUGE
    for group, size in zip(groups, sizes, strict=True):
        _move(group, memory, place)
        place += size
    return _outcome(first, sum(sizes))


def _movable(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields tensors that use the same memory in the same way, which move together."""
    groups: dict[tuple, list[Tensor]] = {}
    for t in tensors:
        if type(t) in (Tensor, nn.Parameter, nn.Buffer) and _is_plain(t):
            key = (t.data_ptr(), t.shape, t.stride(), t.dtype)
            group = groups.setdefault(key, [])
            group += [t] * all(t is not other for other in group)
    ordered = sorted(groups.values(), key=lambda group: group[0].data_ptr())
    following = [*(group[0].data_ptr() for group in ordered[1:]), math.inf]
    reached = 0  # the end of what came before
    for group, limit in zip(ordered, following, strict=False):
        start, end = group[0].data_ptr(), group[0].data_ptr() + group[0].nbytes
        if reached <= start and end <= limit:
            yield group
        reached = max(reached, end)


def _is_plain(t: Tensor) -> bool:
    if t.device.type != "cpu" or t.layout != torch.strided or not t.numel():
        return False
    span = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return span == t.numel() and not (t.is_shared() or t.is_inference())


def _move(group: list[Tensor], memory: mmap.mmap, place: int) -> None:
    old = group[0].detach()
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=old.nbytes, offset=place)
    new = flat.view(old.dtype).as_strided(old.shape, old.stride())
    new.copy_(old)
    for t in group:
        t.data = new


def _outcome(address: int, size: int) -> str:
    try:
        moved = min(_huge_bytes(address), size)
    except OSError as error:  # without /proc
        return f"{size / 1e6:.0f} MB of weights may be in huge pages: {error}"
    share = f"{moved / 1e6:.0f} of {size / 1e6:.0f} MB of weights are in huge pages"
    if moved or not _SETTING.exists():
        return share
    return f"{share}: {_SETTING} is {_SETTING.read_text().strip()}"


def _huge_bytes(address: int) -> int:
    """Returns how many bytes of the mapping at an address Linux keeps in huge pages."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            start, _, end = key.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and key == "AnonHugePages:":
            total += int(rest.split()[0]) * 1024
    return total
