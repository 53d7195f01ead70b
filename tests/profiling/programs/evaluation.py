"""A loop that evaluates every third step, with a scheduler and clipped gradients."""

import torch
import torch.nn.functional as F
from models import Decoder, texts
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
held_out = torch.stack(texts(4))


def loss_of(ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


for step, ids in enumerate(DataLoader(texts(48), batch_size=4, shuffle=True)):
    loss = loss_of(ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(loss.item().hex())
    if step % 3 == 0:
        model.eval()
        with torch.no_grad():
            print("held out", loss_of(held_out).item().hex())
        model.train()
