"""Attention modules in the forms of other people's models. Each takes x, [2, T, 32]."""

import math

import torch
from torch import einsum, nn
from torch.nn import functional as F

N, HEADS, LENGTH = 32, 4, 24


class Projected(nn.Module):
    """q, k and v of x as [batch, heads, length, width]."""

    def __init__(self, p=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(N, 3 * N), nn.Linear(N, N)
        self.drop, self.p, self.heads, self.scale = nn.Dropout(p), p, HEADS, (N // HEADS) ** -0.5

    def operands(self, x):
        return (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))


class NanoGPT(Projected):
    """A flag chooses between torch's function and lines with a buffer of the lower triangle."""

    def __init__(self, flash=True, p=0.0):
        super().__init__(p)
        self.flash = flash
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(N, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        if self.flash:
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.p if self.training else 0, is_causal=True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.drop(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.out(y)


class FromScratch(Projected):
    """In-place masks, and the scale within the softmax."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.triu(torch.ones(64, 64), diagonal=1))

    def forward(self, x):
        b, num_tokens, d_out = x.shape
        queries, keys, values = self.operands(x)
        attn_scores = queries @ keys.transpose(2, 3)
        mask_bool = self.mask.bool()[:num_tokens, :num_tokens]
        attn_scores.masked_fill_(mask_bool, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        attn_weights = self.drop(attn_weights)
        context_vec = (attn_weights @ values).transpose(1, 2)
        context_vec = context_vec.contiguous().view(b, num_tokens, d_out)
        return self.out(context_vec)


def add_mask(scores, attn_mask=None):
    return scores if attn_mask is None else scores + attn_mask


class Vit(Projected):
    """timm's two branches; the second scales q, and a function adds the mask."""

    def __init__(self, fused_attn=True):
        super().__init__()
        self.fused_attn = fused_attn

    def forward(self, x, attn_mask=None):
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, dropout_p=self.drop.p if self.training else 0.0
            )
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = add_mask(attn, attn_mask)
            attn = attn.softmax(dim=-1)
            attn = self.drop(attn)
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, T, C)
        return self.out(x)


class LitGPT(Projected):
    """Torch's function in a method that the forward calls."""

    def forward(self, x, mask=None):
        q, k, v = self.operands(x)
        return self.out(self.attention(q, k, v, mask).flatten(2))

    def attention(self, q, k, v, mask=None):
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=0.0, scale=self.scale, is_causal=mask is None
        )
        return y.transpose(1, 2)


def softcapped(scores, most):
    return torch.tanh(scores / most) * most


class Capped(Projected):
    """litgpt's lines for Gemma 2: a softcap in a function, and a mask of the smallest number."""

    def forward(self, x):
        q, k, v = self.operands(x)
        return self.out(self.attention(q, k, v).flatten(2))

    def attention(self, q, k, v):
        scores = softcapped(q @ k.mT * self.scale, 3.0)
        mask = torch.ones(q.size(2), q.size(2), dtype=q.dtype, device=q.device).triu(diagonal=1)
        mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
        scores = scores + mask
        scores = F.softmax(scores, dim=-1, dtype=torch.float).to(dtype=q.dtype)
        y = scores @ v
        return y.transpose(1, 2)


class Einsum(Projected):
    """Both products are equations, and the softmax is a module."""

    def __init__(self):
        super().__init__()
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.operands(x)
        dots = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        i, j = dots.shape[-2:]
        mask = torch.ones((i, j), device=dots.device, dtype=torch.bool).triu(j - i + 1)
        dots = dots.masked_fill(mask, -torch.finfo(dots.dtype).max)
        attn = self.attend(dots)
        out = einsum("b h i j, b h j d -> b h i d", self.drop(attn), v)
        return self.out(out.transpose(1, 2).flatten(2))


class HeadsLast(Projected):
    """Equations of tensors that have the heads after the length."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
        attention = torch.softmax(energy / (N ** (1 / 2)), dim=3)
        return self.out(torch.einsum("nhql,nlhd->nqhd", [attention, v]).flatten(2))


class MultiQuery(Projected):
    """One head of keys and values, by an equation and by broadcasting."""

    def forward(self, x):
        q, k, v = self.operands(x)
        scores = einsum("b h i d, b j d -> b h i j", q, k[:, 0]) * self.scale
        return self.out((scores.softmax(-1) @ v[:, :1]).transpose(1, 2).flatten(2))


class OneHead(nn.Module):
    """Three dimensions, with a mask of three."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x, mask=None):
        weights = torch.bmm(self.q(x), self.k(x).transpose(1, 2)).div(math.sqrt(N))
        if mask is not None:
            weights = weights.masked_fill(mask == 0, -1e9)
        weights = F.softmax(weights, dim=-1)
        return torch.bmm(F.dropout(weights, p=0.1, training=self.training), self.v(x))


def attention(query, key, value, mask=None):
    """A function of the file, which returns the result alone."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(scores.softmax(dim=-1), value)


class Function(Projected):
    def forward(self, x, mask=None):
        q, k, v = self.operands(x)
        return self.out(attention(q, k, v, mask=mask).transpose(1, 2).flatten(2))


class Static(Projected):
    @staticmethod
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        return self.out(self.attend(*self.operands(x)).transpose(1, 2).flatten(2))


class Biased(Projected):
    """Numbers that are added to the scores, in float32 as in many encoders, and learned ones."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def forward(self, x):
        q, k, v = self.operands(x)
        T = x.shape[1]
        scores = torch.matmul(q, k.mT) * self.scale
        scores += self.table[:, :T, :T]
        hidden = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        scores = torch.where(hidden, -math.inf, scores)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        return self.out(self.drop(weights).matmul(v).transpose(1, 2).flatten(2))


class Llama(Projected):
    """A float mask that is made in each call, and a softmax in float32."""

    def forward(self, x):
        xq, keys, values = self.operands(x)
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), float("-inf"), device=x.device)
        mask = torch.triu(mask, diagonal=1).type_as(x)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(N // HEADS)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        output = output.transpose(1, 2).contiguous().view(*x.shape[:2], -1)
        return self.out(output)


FUSED = {
    "nanoGPT": NanoGPT,
    "nanoGPT by hand": lambda: NanoGPT(False),
    "from scratch": FromScratch,
    "ViT": Vit,
    "ViT by hand": lambda: Vit(False),
    "litgpt": LitGPT,
    "softcap": Capped,
    "einsum": Einsum,
    "heads last": HeadsLast,
    "one key head": MultiQuery,
    "one head": OneHead,
    "function": Function,
    "static method": Static,
    "bias": Biased,
    "llama": Llama,
}


class Shown(Projected):
    """torch.where keeps the scores of keys that are seen."""

    def forward(self, x, mask):
        q, k, v = self.operands(x)
        scores = torch.where(mask, q @ k.mT * self.scale, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Hidden(Projected):
    """torch.where hides some keys, and masked_fill hides later keys."""

    def forward(self, x, mask):
        q, k, v = self.operands(x)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = torch.where(~mask, -math.inf, q @ k.mT * self.scale).masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OverQueries(Projected):
    """The weights of each key sum to one."""

    def forward(self, x):
        q, k, v = self.operands(x)
        return self.out(((q @ k.mT * self.scale).softmax(-2) @ v).transpose(1, 2).flatten(2))


def inputs(dtype=torch.float32):
    return torch.randn(2, LENGTH, N, dtype=dtype)


def attention_rows(sites):
    return [site for site in sites if site.kind == "attention"]
