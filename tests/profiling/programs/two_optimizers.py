"""Two models with an optimizer each, trained in turn: a generator and its critic."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
critic = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
critics = torch.optim.AdamW(critic.parameters(), lr=1e-3)
generators = torch.optim.Adam(generator.parameters(), lr=1e-3)
for _ in range(12):
    real, noise = torch.randn(256, 64), torch.randn(256, 32)
    loss = critic(generator(noise).detach()).mean() - critic(real).mean()
    critics.zero_grad()
    loss.backward()
    critics.step()
    fooled = -critic(generator(noise)).mean()
    generators.zero_grad()
    fooled.backward()
    generators.step()
    print(loss.item().hex(), fooled.item().hex())
