"""Triton attention's launch settings: arguments, tile sizes, compile options.

Loads use plain pointers, which work with any strides and any alignment.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fusedops.triton.tile import architecture, dropout_arguments, l2_bytes

WIDEST = 512
LOG2E = 1.4426950408889634


class Tiles(NamedTuple):
    """Tile sizes by padded width: M queries by N keys, warps, pipeline stages, and maxnreg.

    maxnreg is the register limit per thread, if it is not 255. A block of more rows multiplies more
    per byte that it loads. checks/machine_code/attention.py has the least FLOP per byte, and
    gates.py excuses the spills that large blocks cost.
    """

    plain: dict[int, tuple]  # 16-bit calls
    rich: dict[int, tuple]  # 16-bit calls with a bias, dropout or softcap, which need registers too
    # The same calls on sm_90: its fast dots read shared memory and need 64 rows for 4 warps, while
    # sm_80's dots keep their operands in registers.
    hopper: dict[int, tuple]
    hopper_rich: dict[int, tuple]
    # All calls in float32, whose dots keep all operands in registers. With maxnreg None, ptxas
    # limits itself to 128 or 80 registers and spills some; small tiles spill with all 255.
    float32: dict[int, tuple]


FORWARD = Tiles(
    plain={64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 1), 512: (32, 32, 8, 1)},
    rich={64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 2), 512: (16, 32, 8, 1)},
    # Three stages: with two, a tile's loads start after its last product and are waited for.
    hopper={64: (128, 128, 8, 3), 128: (128, 128, 8, 3), 256: (128, 64, 8, 2)},
    hopper_rich={},
    float32={128: (32, 16, 8, 1, None), 256: (32, 16, 8, 1), 512: (16, 16, 8, 1)},
)
# The backward's float32 tiles, except for the widest rows.
SMALL: dict[int, tuple] = {64: (16, 16, 8, 1, None), 128: (16, 16, 4, 1), 256: (16, 16, 8, 1)}
QUERIES = Tiles(
    plain={64: (128, 32, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1), 512: (32, 16, 8, 1)},
    rich={64: (64, 32, 8, 2), 128: (64, 16, 8, 2), 256: (16, 16, 8, 1), 512: (16, 32, 8, 1)},
    hopper={64: (128, 128, 8, 2), 128: (128, 128, 8, 2), 256: (128, 32, 8, 2)},
    hopper_rich={64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (128, 32, 8, 1)},
    float32=SMALL | {512: (8, 16, 8, 1)},
)
KEYS = Tiles(
    plain={64: (32, 128, 8, 2), 128: (64, 64, 8, 1), 256: (32, 32, 8, 1), 512: (32, 16, 8, 1)},
    rich={64: (32, 32, 4, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1), 512: (16, 16, 8, 1)},
    hopper={64: (64, 128, 8, 3), 128: (64, 128, 8, 3), 256: (32, 128, 8, 1)},
    hopper_rich={64: (32, 128, 8, 2), 128: (32, 128, 8, 2), 256: (32, 128, 8, 1)},
    float32=SMALL | {512: (16, 8, 8, 1)},
)
# The interpreter's one tile: a tile's cost there does not depend on its size, and numpy's rounding
# depends on shapes.
INTERPRETED = (64, 64, 4, 1)
WHOLE = 128  # the widest rows for which one program sums both dk and dv
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
OPTIONS = {"enable_fp_fusion": True}  # Triton's default; 3.9 warns about it
# Arguments whose values must not specialise a kernel.
NOT_SPECIALIZED = (
    *("sequences", "heads", "group", "queries", "keys", "blocks", "together"),
    *("threshold", "left", "right", "pages"),
)


@dataclass(frozen=True)
class AttentionLaunch:
    """A call's arguments, in the kernels' form."""

    q: Tensor  # [B, Hq, Sq, D]; rows of q, k and v are contiguous
    k: Tensor
    v: Tensor
    bias: Tensor | None  # expanded to [B, Hq, Sq, Sk]
    sinks: Tensor | None  # float64
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    scalars: Sequence[float]  # scale, softcap, dropout_p
    window: Sequence[int]
    bottom_right: bool
    used: Tensor | None = None  # [B]: k and v are a cache; each sequence uses this many of its keys
    table: Tensor | None = None  # [B, pages]: k and v are [pages, Hkv, page, D]

    @classmethod
    def for_cache(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        used: Tensor,
        table: Tensor | None,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor | None,
        scalars: Sequence[float],
        window: Sequence[int],
    ) -> "AttentionLaunch":
        scale, softcap = scalars
        tensors = q, k, v, None, sinks, cu_seqlens_q, None, None
        call = cls.of(*tensors, (scale, softcap, 0.0), window, True)
        table = None if table is None else table.contiguous()
        return replace(call, used=used.contiguous(), table=table)

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        seed: Tensor | None,
        scalars: Sequence[float],
        window: Sequence[int],
        bottom_right: bool,
    ) -> "AttentionLaunch":
        if bias is not None:
            bias = bias.expand(*q.shape[:3], k.shape[2])
        if sinks is not None:
            sinks = sinks.to(torch.float64).contiguous()
        lengths = cu_seqlens_q, cu_seqlens_k
        cu_q, cu_k = (None if t is None else t.contiguous() for t in lengths)
        q, k, v = (side_by_side(t) for t in (q, k, v))
        return cls(q, k, v, bias, sinks, cu_q, cu_k, seed, scalars, window, bottom_right)

    @property
    def sequences(self) -> int:
        """The number of packed sequences; 0 for a batch."""
        return 0 if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def batch(self) -> int:
        return self.k.shape[0] if self.used is None else self.used.shape[0]

    @property
    def room(self) -> int:
        """Keys of a batch entry, or what a sequence has room for."""
        keys = self.k.shape[2]
        return keys if self.table is None else keys * self.table.shape[1]

    @property
    def width(self) -> int:
        """The wider of q's and v's rows, as padded for the kernels."""
        return max(padded(self.q.shape[3]), padded(self.v.shape[3]))

    @property
    def rich(self) -> bool:
        """Whether the scores need more than the matmuls and positions."""
        _, softcap, dropout_p = self.scalars
        return self.bias is not None or softcap != 0 or dropout_p != 0

    @property
    def additive(self) -> bool:
        return self.bias is not None and self.bias.dtype != torch.bool

    @property
    def map(self) -> str:
        """How products become scores; see `curved`.

        "folded" rounds once more than eager if the scale is a power of 2. This does not matter in
        16 bits, but is too much in float32.
        """
        scale, softcap, _ = self.scalars
        if softcap != 0:
            return "capped"
        folds = self.q.dtype != torch.float32 and scale > 0 and not self.additive
        return "folded" if folds else "scaled"

    @property
    def curve(self) -> tuple[float, float]:
        scale, softcap, _ = self.scalars
        inner = {"capped": scale / (softcap or 1), "scaled": scale, "folded": scale * LOG2E}
        return inner[self.map], softcap

    def blocks(self, rows: int, size: int) -> int:
        """Blocks per head: enough for the rows of a batch, or for any lengths of packed sequences.

        A sequence's first block may start up to three rows early (see `block_of`).
        """
        return -(-(rows + 3 * self.sequences) // size) + self.sequences

    def arguments(self) -> dict[str, Any]:
        """The arguments that all kernels take."""
        q, k, v, bias = self.q, self.k, self.v, self.bias
        seed, threshold, kept_scale = dropout_arguments(self.scalars[2], self.seed)
        inner, softcap = self.curve
        widest = q.shape[2] + self.room  # above any position; sums do not overflow
        left, right = (None if n < 0 else min(n, widest) for n in self.window)
        names = ("batch", "head", "row")
        strides = {
            f"{name}_{what}": stride
            for name, t in (("q", q), ("k", k), ("v", v))
            for what, stride in zip(names, t.stride(), strict=False)
        }
        bias_strides = (0,) * 4 if bias is None else bias.stride()
        strides |= dict(
            zip(("bias_batch", "bias_head", "bias_row", "bias_key"), bias_strides, strict=True)
        )
        return strides | {
            "q": q,
            "k": k,
            "v": v,
            "bias": bias,
            "sinks": self.sinks,
            "cu_q": self.cu_seqlens_q,
            "cu_k": self.cu_seqlens_k,
            "seed": seed,
            "sequences": self.sequences,
            "heads": q.shape[1],
            "group": q.shape[1] // max(k.shape[1], 1),
            "queries": q.shape[2],
            "keys": self.room,
            "inner": inner,
            "softcap": softcap,
            "threshold": threshold,
            "kept_scale": kept_scale,
            "left": left,
            "right": right,
            "MAP": self.map,
            "BOTTOM_RIGHT": self.bottom_right,
            "SEQUENCES": triton.next_power_of_2(max(self.sequences, 1)),
            "WIDTH": q.shape[3],
            "V_WIDTH": v.shape[3],
            "D": padded(q.shape[3]),
            "DV": padded(v.shape[3]),
        }


def cache_arguments(call: AttentionLaunch) -> dict[str, Any]:
    """The forward's arguments of a cache."""
    table = call.table
    return {
        "used": call.used,
        "table": table,
        "table_row": 0 if table is None else table.shape[1],
        "pages": call.k.shape[0],
        "PAGE": 0 if table is None else call.k.shape[2],
    }


def forward_tile(call: AttentionLaunch, rows: int) -> dict[str, Any]:
    """The forward's tile. rows: the number of rows in a packed block; 0 without packing."""
    tile = chosen(call, FORWARD)
    if not rows:
        return tile
    warps = 4 if call.width <= 256 else 8
    few = {"M": min(padded(rows), tile["M"]), "N": min(32, tile["N"])}
    return tile | few | {"num_warps": warps, "maxnreg": 255}


def heads_together(call: AttentionLaunch) -> int:
    """The number of heads whose blocks run together, those with most keys first.

    The last blocks to run then have few keys, so a GPU's multiprocessors end at about the same
    time. More heads than the L2 cache holds would read k and v from memory.
    """
    if call.window[1] < 0 or call.sequences or call.used is not None:
        return 1
    batch, kv_heads, keys, width = call.k.shape
    each = max(keys * (width + call.v.shape[3]) * call.k.element_size(), 1)
    together = max(l2_bytes(call.q.device) * 2 // 3 // each, 1)
    return min(together, batch * kv_heads) * (call.q.shape[1] // max(kv_heads, 1))


def query_tile(call: AttentionLaunch) -> dict[str, Any]:
    return chosen(call, QUERIES)


def key_launches(
    call: AttentionLaunch, dk: Tensor | None, dv: Tensor | None
) -> list[dict[str, Any]]:
    """The key kernel's tile, and the gradients that each launch computes."""
    tile = chosen(call, KEYS)
    both = [(None, dv), (dk, None)] if call.width > WHOLE else [(dk, dv)]
    return [tile | {"dk": k, "dv": v} for k, v in both if k is not None or v is not None]


def chosen(call: AttentionLaunch, tiles: Tiles) -> dict[str, Any]:
    """A call's tile as the kernels' arguments."""
    tile = INTERPRETED if INTERPRETING else _tile(call, tiles)
    if len(tile) == 4:
        tile = *tile, 255
    return dict(zip(("M", "N", "num_warps", "num_stages", "maxnreg"), tile, strict=True)) | OPTIONS


def _tile(call: AttentionLaunch, tiles: Tiles) -> tuple:
    if call.q.dtype.itemsize == 4:
        table = tiles.float32
    else:
        table = tiles.rich if call.rich else tiles.plain
        if on_sm_90(call):
            table = table | (tiles.hopper_rich if call.rich else tiles.hopper)
    return next(table[width] for width in table if call.width <= width)


def on_sm_90(call: AttentionLaunch) -> bool:
    return architecture(call.q.device) // 10 == 9


def has_kernel(q: Tensor, v: Tensor) -> bool:
    return q.dtype != torch.float64 and max(q.shape[3], v.shape[3]) <= WIDEST


def padded(width: int) -> int:
    """Rounded up to a power of two of at least 16, as tl.dot requires."""
    return max(triton.next_power_of_2(width), 16)


def side_by_side(t: Tensor) -> Tensor:
    """t, or a copy: rows are contiguous, and a block of 128 rows spans less than 2^31 elements.

    Kernels use 32-bit offsets within a block, and 64-bit offsets to it.
    """
    if (t.shape[3] <= 1 or t.stride(3) == 1) and t.stride(2) < 2**24:
        return t
    return t.contiguous()
