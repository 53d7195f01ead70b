"""The definition of rotary_embedding, in the input's dtype: exact for float64 inputs."""

import torch


def rotary_embedding_reference(q, k, cos, sin, *, unsqueeze_dim=1, interleaved=False):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    n = cos.shape[-1]

    def rotated(x):
        y = x[..., :n] * cos + _quarter_turn(x[..., :n], interleaved) * sin
        if x.shape[-1] == n:
            return y
        return torch.cat([y, x[..., n:].expand(*y.shape[:-1], -1)], -1)

    return rotated(q), rotated(k)


def _quarter_turn(x, interleaved):
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)
