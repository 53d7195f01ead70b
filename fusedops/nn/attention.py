"""A fused torch.nn.MultiheadAttention."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedops.extension import overridden
from fusedops.functional import scaled_dot_product_attention
from fusedops.functional.attention import DEVICES

__all__ = ["MultiheadAttention"]


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention that never stores the scores. Same arguments and state dict.

    query: [L, B, embed_dim]. key: [S, B, kdim]. value: [S, B, vdim]. With batch_first, B comes
    first; all three may lack B. All have the parameters' dtype: float32, float16, bfloat16 or
    float64. Returns (output, None), or torch's (output, weights) with need_weights. output has
    query's shape and dtype.

    Some calls run torch's own code: need_weights=True (torch's default; the weights are the stored
    scores), devices without a kernel, nested tensors, tensor subclasses, and invalid arguments, so
    that torch raises its own error. Vaswani et al., arXiv:1706.03762.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        masks = key_padding_mask, attn_mask
        if (
            need_weights
            or query.device.type not in DEVICES
            or not self._fits(query, key, value, *masks, is_causal)
        ):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        if query.dim() == 2:
            rows = None if key_padding_mask is None else key_padding_mask[None]
            out = self._attend(query[None], key[None], value[None], rows, attn_mask, is_causal)
            return out[0], None
        if self.batch_first:
            return self._attend(query, key, value, *masks, is_causal), None
        shared = key is query, value is key
        query = query.transpose(0, 1)
        key = query if shared[0] else key.transpose(0, 1)
        value = key if shared[1] else value.transpose(0, 1)
        out = self._attend(query, key, value, *masks, is_causal)
        return out.transpose(0, 1).contiguous(), None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """query: [B, L, embed_dim]. key, value: [B, S, kdim or vdim]. Returns [B, L, embed_dim]."""
        if is_causal and key_padding_mask is None:
            attn_mask = None  # is_causal promises that attn_mask is the causal mask
        else:
            is_causal = False
        q, k, v = self._projected(query, key, value)
        extra = 0  # appended keys, which every query sees
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([t, bias.to(t.dtype).expand(len(t), 1, -1)], 1)
                for t, bias in ((k, self.bias_k), (v, self.bias_v))
            )
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        seen = self._seen(query, key_padding_mask, attn_mask)
        if seen is not None and extra:
            seen = F.pad(seen, (0, extra), value=seen.dtype == torch.bool)
        shape = self.num_heads, self.head_dim
        q, k, v = (t.unflatten(-1, shape).transpose(1, 2) for t in (q, k, v))
        dropout_p = self.dropout if self.training else 0.0
        out = scaled_dot_product_attention(q, k, v, seen, dropout_p, is_causal)
        return self.out_proj(out.transpose(1, 2).flatten(-2))

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        bias = self.in_proj_bias
        if query is key and key is value and self._qkv_same_embed_dim:
            return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        weights = (
            self.in_proj_weight.chunk(3)
            if self._qkv_same_embed_dim
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        inputs = query, key, value
        return tuple(F.linear(*operands) for operands in zip(inputs, weights, biases, strict=True))

    def _seen(
        self, query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor | None:
        """Merges both masks into one that broadcasts to [B, H, L, S].

        If it is bool, True means visible; if it is floating-point, it is added to the scores.
        """
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask[:, None, None]
        masks = [m for m in (key_padding_mask, attn_mask) if m is not None]
        if all(m.dtype == torch.bool for m in masks):
            hidden = masks[0] | masks[-1] if masks else None
            return None if hidden is None else ~hidden
        added = [_added(m, query.dtype) for m in masks]
        return added[0] if len(added) == 1 else added[0] + added[1]

    def _fits(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        """Whether the arguments are plain tensors of the shapes that torch documents."""
        tensors = [t for t in (query, key, value, key_padding_mask, attn_mask) if t is not None]
        if overridden(*tensors) or any(t.is_nested for t in tensors):
            return False
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            return False
        if is_causal and attn_mask is None:
            return False
        along = 0 if query.dim() == 2 or not self.batch_first else 1  # the length's dimension
        batch = () if query.dim() == 2 else (query.shape[1 - along],)
        length, source = query.shape[along], key.shape[along]
        heads = self.num_heads * (batch[0] if batch else 1)
        widths = query.shape[-1], key.shape[-1], value.shape[-1]
        return (
            widths == (self.embed_dim, self.kdim, self.vdim)
            and key.shape[:-1] == value.shape[:-1]
            and (not batch or key.shape[1 - along] == batch[0])
            and _is_mask(key_padding_mask, (*batch, source))
            and _is_mask(attn_mask, (length, source), (heads, length, source))
        )


def _is_mask(mask: Tensor | None, *shapes: tuple[int, ...]) -> bool:
    if mask is None:
        return True
    return tuple(mask.shape) in shapes and (mask.dtype == torch.bool or mask.is_floating_point())


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a mask to numbers that are added to the scores: a bool True becomes -inf."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
