"""The definition of rotary_embedding, in float32 (float64 for float64), rounded once."""

import torch


def rotary_embedding_reference(q, k, cos, sin, *, unsqueeze_dim=1, interleaved=False):
    return rotary_reference(q, k, cos, sin, unsqueeze_dim, interleaved)


def rotary_reference(q, k, cos, sin, unsqueeze_dim, interleaved):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    n = cos.shape[-1]

    def rotated(x):
        dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        turned = x[..., :n].to(wide)
        y = turned * cos.to(wide) + _quarter_turn(turned, interleaved) * sin.to(wide)
        y = y.to(dtype)
        if x.shape[-1] == n:
            return y
        return torch.cat([y, x[..., n:].to(dtype).expand(*y.shape[:-1], -1)], -1)

    return rotated(q), rotated(k)


def _quarter_turn(x, interleaved):
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)
