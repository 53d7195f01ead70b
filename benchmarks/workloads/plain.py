"""Small plain models that compute as programs outside of transformers do, for `models`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPT(nn.Module):
    """Learned positions, one product for q, k and v, torch's attention, and its own loss."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, heads: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, bias=False)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class GPTBlock(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)
        self.attention = CausalSelfAttention(hidden, heads)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CausalSelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(x).split(hidden, dim=2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, hidden))


class RotaryLM(nn.Module):
    """RMSNorm, rotary embeddings of one tensor at a time, grouped heads and a gated MLP."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, heads: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(RotaryBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        width = hidden // heads
        inverse = 1 / 10000 ** (torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.tokens(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


class RotaryBlock(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.attention = GroupedSelfAttention(hidden, heads)
        self.gate = nn.Linear(hidden, 8 * hidden // 3, bias=False)
        self.up = nn.Linear(hidden, 8 * hidden // 3, bias=False)
        self.down = nn.Linear(8 * hidden // 3, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GroupedSelfAttention(nn.Module):
    """Two heads of queries share one of keys and values."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.qkv = nn.Linear(hidden, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        sizes = [hidden, hidden // 2, hidden // 2]
        parts = (part.view(batch, length, -1, self.width) for part in self.qkv(x).split(sizes, -1))
        q, k, v = (part.transpose(1, 2) for part in parts)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(dtype=x.dtype)


class ImageEncoder(nn.Module):
    """Patches of an image, blocks with norms first, and a head on the mean."""

    def __init__(self, classes: int, hidden: int, layers: int, heads: int, patch: int = 16):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.blocks = nn.Sequential(*(ImageBlock(hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class ImageBlock(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps=1e-6), nn.LayerNorm(hidden, eps=1e-6)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.act, self.fc2 = (
            nn.Linear(hidden, 4 * hidden),
            nn.GELU(),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))
