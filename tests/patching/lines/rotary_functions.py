"""Rotary functions of models, of other signatures than transformers'.

Their asserts are Python's: pytest rewrites those of its tests, whose source then differs.
"""

import torch


def halves(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), -1)


def pairs(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)


def rope_with_checks(x, cos, sin):
    """As litgpt: a table [B, T, width]."""
    if cos.dim() != 3:
        raise ValueError("cos must have three dimensions")
    if cos.shape != sin.shape:
        raise ValueError("cos and sin must be alike")
    more = x.dim() - cos.dim()
    if more > 0:
        shape = cos.shape[0:1] + (1,) * more + cos.shape[1:]
        cos, sin = cos.view(*shape), sin.view(*shape)
    return (x * cos + halves(x) * sin).to(x.dtype)


def rope_of_a_long_table(x, cos, sin):
    """As LLMs-from-scratch: the first rows of a table [many, width]."""
    _, _, length, width = x.shape
    assert width % 2 == 0, "the width must be even"
    a, b = x[..., : width // 2], x[..., width // 2 :]
    cos, sin = cos[:length].unsqueeze(0).unsqueeze(0), sin[:length].unsqueeze(0).unsqueeze(0)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def rotary_backwards(x, cos, sin):
    """As nanochat: rotates to the other side, with half a table [1, T, 1, width / 2]."""
    assert x.ndim == 4
    d = x.shape[3] // 2
    a, b = x[..., :d], x[..., d:]
    return torch.cat([a * cos + b * sin, a * (-sin) + b * cos], 3).to(x.dtype)


def rotary_anywhere(x, cos, sin):
    return x * cos + halves(x) * sin


def rot_embed(x, sin_emb, cos_emb, half: bool = False):
    """As timm."""
    if half:
        return (x * cos_emb + halves(x) * sin_emb).to(x.dtype)
    return (x * cos_emb + pairs(x) * sin_emb).to(x.dtype)


def rot_embed_of_sides(x, emb, half: bool = False):
    sin, cos = emb.chunk(2, -1)
    return rot_embed(x, sin, cos, half=half)


def rotary_of_pairs(x, freqs_cis):
    """As gpt-fast."""
    shaped = x.float().reshape(*x.shape[:-1], -1, 2)
    table = freqs_cis.view(1, shaped.size(1), 1, shaped.size(3), 2)
    a, b = shaped[..., 0], shaped[..., 1]
    out = [a * table[..., 0] - b * table[..., 1], b * table[..., 0] + a * table[..., 1]]
    return torch.stack(out, -1).flatten(3).type_as(x)


def shaped_like(freqs_cis, x):
    ndim = x.ndim
    assert 0 <= 1 < ndim
    assert freqs_cis.shape == (x.shape[1], x.shape[-1])
    shape = [d if i == 1 or i == ndim - 1 else 1 for i, d in enumerate(x.shape)]
    return freqs_cis.view(*shape)


def rotary_of_complex(xq, xk, freqs_cis):
    """As Llama's own code."""
    q = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    k = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    table = shaped_like(freqs_cis, q)
    q, k = (torch.view_as_real(x * table).flatten(3) for x in (q, k))
    return q.type_as(xq), k.type_as(xk)


def rotary_sin_first(q, k, sin, cos):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


# Functions of these signatures that are none, or that no call may be spared.


def rope_scaled(x, cos, sin):
    return 1.01 * rotary_anywhere(x, cos, sin)


def rope_of_few(x, cos, sin):
    if x.shape[2] > 6:
        x = x * 2
    return rotary_anywhere(x, cos, sin)


def rope_of_few_rows(x, cos, sin):
    assert x.shape[2] == 5
    return rotary_anywhere(x, cos, sin)


def rope_of_numbers(x, cos, sin):
    return rotary_anywhere(x, cos, sin) * (1 + (x.shape[2] > 6))


def rope_in_a_loop(x, cos, sin):
    while x.dim() < 3:
        x = x[None]
    return rotary_anywhere(x, cos, sin)


def rope_of_a_renamed_option(x, cos, sin, half: bool = False):
    half = x.shape[2] > 6
    if half:
        x = x * 2
    return rotary_anywhere(x, cos, sin)


def rotary_of_positions(x, positions):
    return x * positions


def rope_reordered(x, cos, sin):
    """As litgpt's interleaved one: takes pairs and returns halves."""
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotary_anywhere(x, cos, sin)
