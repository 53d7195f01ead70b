"""accelerate's loop, with its gradient accumulation."""

import torch
from accelerate import Accelerator
from models import rows, tiny_llama
from torch.utils.data import DataLoader

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(rows(96), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item().hex())
