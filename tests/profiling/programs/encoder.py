"""A decoder of another module's outputs, whose norm is stepped in the backward."""

import torch
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Linear(32, 64), nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512))
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder[0].parameters()], lr=1e-3)
norms = torch.optim.SGD([decoder[1].weight], lr=1e-2, momentum=0.9)
decoder[1].weight.register_post_accumulate_grad_hook(lambda _: norms.step())
for _ in range(16):
    loss = decoder(encoder(torch.randn(64, 32))).sin().square().mean()
    optimizer.zero_grad()
    norms.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
