"""Gradient accumulation over four batches a step, in bfloat16 autocast."""

import torch
import torch.nn.functional as F
from models import Decoder, texts
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for index, ids in enumerate(DataLoader(texts(96), batch_size=2)):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    (loss / 4).backward()
    print(loss.item().hex())
    if index % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
