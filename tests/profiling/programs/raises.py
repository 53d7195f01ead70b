"""A loop that raises in its eighth step."""

import torch
from models import Decoder, texts

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = torch.stack(texts(48)).split(4)
for step, ids in enumerate(batches):
    loss = model(ids).square().mean()
    loss.backward()
    if step == 7:
        raise FloatingPointError("the loss is too good to be true")
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
