"""A plain loop over a DataLoader: `plain.py STEPS`. The loss is computed outside of the model."""

import sys

import torch
import torch.nn.functional as F
from models import Decoder, texts
from torch.utils.data import DataLoader

steps = int(sys.argv[1])
torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in DataLoader(texts(4 * steps), batch_size=4):
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
