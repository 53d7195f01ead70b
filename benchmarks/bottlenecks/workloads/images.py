"""A small ViT learns the rotation of JPEG images that a loader augments.

The images are pieces of the photograph that matplotlib brings (grace_hopper.jpg), compressed as
JPEG files in memory. The class of a sample is by how many right angles it is turned (RotNet,
arXiv:1803.07728). Pillow and numpy decode, crop, resize, mirror, recolour and normalize it.
"""

import io
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.bottlenecks.workloads.workload import Block, Workload, epoch

__all__ = ["make"]

BATCH, SIDE, PATCH = 16, 64, 16
PIECES, PIECE = 64, 384  # images, and their pixels a side
TURNS = 4
SIZES = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3}
STEPS, FILLING = 10, 3  # timed steps of a block, and those in which a worker catches up


class Photographs(Dataset):
    """Samples: float32 [3, SIDE, SIDE], and the number of right angles by which it is turned.

    decoded: the files are decoded and made smaller once, when the first sample is read.
    """

    def __init__(self, count: int, decoded: bool = False) -> None:
        self.count, self.decoded = count, decoded

    def __len__(self) -> int:
        return self.count

    @cached_property
    def images(self) -> list[Any]:
        """Files, or images of a quarter of their size."""
        files = [*pieces()]
        return [opened(file).resize((PIECE // 4,) * 2) for file in files] if self.decoded else files

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random, image = Random(index), self.images[index % PIECES]
        turns = random.randrange(TURNS)
        pixels = augmented(image if self.decoded else opened(image), random)
        return torch.rot90(pixels, turns, (1, 2)).contiguous(), turns


def make() -> Workload:
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: list[Tensor]) -> None:
        pixels, turns = batch
        model(pixel_values=pixels, labels=turns).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(decoded: bool = False, wall: bool = False, **options: Any) -> Block:
        data = DataLoader(Photographs((STEPS + FILLING) * BATCH, decoded), BATCH, **options)
        return lambda: epoch(step, data, skipped=FILLING, wall=wall) / STEPS

    def with_worker() -> tuple[Block, Block]:
        return block(wall=True), block(wall=True, num_workers=1, persistent_workers=True)

    def decoded_once() -> tuple[Block, Block]:
        return block(), block(decoded=True)

    return Workload(
        f"A ViT of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters is trained "
        f"to say how an image is turned: {BATCH} images of {SIDE} x {SIDE} a batch, float32, "
        f"AdamW. Each is a JPEG of {PIECE} x {PIECE} pixels, a piece of a photograph, which the "
        "DataLoader decodes, crops, resizes, mirrors, recolours and normalizes with Pillow.",
        step,
        DataLoader(Photographs(10**6), BATCH),
        model,
        optimizer,
        {"workers": with_worker, "collate": decoded_once},
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sides = {"image_size": SIDE, "patch_size": PATCH}
    width = 4 * SIZES["hidden_size"]
    config = ViTConfig(intermediate_size=width, num_labels=TURNS, **SIZES, **sides)
    torch.manual_seed(0)
    return ViTForImageClassification(config).train()


def pieces() -> Iterator[bytes]:
    """Squares of the photograph as JPEG files."""
    import matplotlib
    from PIL import Image

    folder = Path(matplotlib.get_data_path())
    photograph = Image.open(folder / "sample_data/grace_hopper.jpg").convert("RGB")
    width, height = photograph.size
    random = Random(0)
    for _ in range(PIECES):
        x, y = random.randrange(width - PIECE), random.randrange(height - PIECE)
        file = io.BytesIO()
        photograph.crop((x, y, x + PIECE, y + PIECE)).save(file, "JPEG", quality=90)
        yield file.getvalue()


def opened(content: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(content)).convert("RGB")


def augmented(image: Any, random: Random) -> Tensor:
    """float32 [3, SIDE, SIDE] of an image: a random crop and colours, perhaps mirrored."""
    import numpy as np
    from PIL import Image, ImageEnhance

    whole = image.width
    side = int(whole * random.uniform(0.7, 1.0))
    x, y = (int(random.random() * (whole - side + 1)) for _ in range(2))
    box = (x, y, x + side, y + side)
    image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = kind(image).enhance(random.uniform(0.6, 1.4))
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1.0).permute(2, 0, 1)
