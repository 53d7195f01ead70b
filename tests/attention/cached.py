"""KV caches for attention's tests, with NaN wherever no sequence has a key."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.cases import drawn, on
from fusedops.functional import attention
from fusedops.references.attention import cached_attention_reference


@dataclass(frozen=True)
class Cache:
    """A call's tensors. block_table None: k and v are [B, Hkv, Sk, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    seqused_k: Tensor
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None

    def call(self, **options):
        named = {"block_table": self.block_table, "cu_seqlens_q": self.cu_seqlens_q}
        return attention(
            self.q, self.k, self.v, seqused_k=self.seqused_k, return_lse=True, **named, **options
        )

    def reference(self, order=slice(None), **options):
        """order: of the width, for another draw of eager's roundings."""
        named = {"block_table": self.block_table, "cu_seqlens_q": self.cu_seqlens_q}
        q, k = self.q[..., order], self.k[..., order]
        return cached_attention_reference(q, k, self.v, self.seqused_k, **named, **options)

    def double(self):
        return replace(self, q=self.q.double(), k=self.k.double(), v=self.v.double())

    def on(self, backend):
        tensors = self.q, self.k, self.v, self.seqused_k, self.block_table, self.cu_seqlens_q
        return Cache(*on(backend, *tensors))

    def alone(self, b):
        """q, k and v of one sequence without a cache: [1, H, S, D]."""
        n, cu = int(self.seqused_k[b]), self.cu_seqlens_q
        q = self.q[b] if cu is None else self.q[cu[b] : cu[b + 1]].transpose(0, 1)
        k, v = (t[b] for t in (self.k, self.v)) if self.block_table is None else self._gathered(b)
        return q[None], k[None, :, :n], v[None, :, :n]

    def _gathered(self, b):
        n, size = int(self.seqused_k[b]), self.k.shape[1]
        pages = self.block_table[b, : -(-n // size)].long()
        return (t[pages].flatten(0, 1).transpose(0, 1) for t in (self.k, self.v))


def dense(queries, used, heads=(4, 2), width=24, v_width=None, dtype=torch.float32, room=None):
    """A cache with room for more keys than the longest sequence has."""
    room = max(used) + 3 if room is None else room
    q_heads, kv_heads = heads
    q = drawn(1, len(used), queries, q_heads, width).transpose(1, 2) * 1.5
    k = drawn(2, len(used), kv_heads, room, width) * 1.5
    v = drawn(3, len(used), kv_heads, room, width if v_width is None else v_width)
    for b, n in enumerate(used):
        k[b, :, n:] = v[b, :, n:] = torch.nan
    return Cache(*(t.to(dtype) for t in (q, k, v)), torch.tensor(used, dtype=torch.int32))


def paged(queries, used, size, **shape):
    """Pages in another order, more than are used. Sequences with equal first keys share pages.

    Entries of the table after a sequence's last page are -1.
    """
    cache = dense(queries, used, **shape)
    pages = [-(-n // size) for n in used]
    count = sum(pages) + 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(used), max(*pages, 1)), -1, dtype=torch.int32)
    stores = []
    for t in (cache.k, cache.v):
        stores.append(t.new_full((count, size, t.shape[1], t.shape[3]), torch.nan))
    for b, n in enumerate(used):
        for i in range(pages[b]):
            table[b, i] = page = order.pop()
            at = slice(i * size, min(n, (i + 1) * size))
            for store, t in zip(stores, (cache.k, cache.v), strict=True):
                store[page, : at.stop - at.start] = t[b, :, at].transpose(0, 1)
    return replace(cache, k=stores[0], v=stores[1], block_table=table)


def packed(cache, queries):
    """The same cache for as many queries of each sequence; two tokens follow the last one."""
    cu_seqlens_q = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = drawn(4, sum(queries) + 2, cache.q.shape[1], cache.q.shape[3]).to(cache.q.dtype)
    return replace(cache, q=q, cu_seqlens_q=cu_seqlens_q)
