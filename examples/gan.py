"""A GAN: two steps, each with its own optimizer, work on the same two models.

Run it with `torchrun --nproc-per-node 2 examples/gan.py`.
"""

import os

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import pardnn


def critic_step(critic, generator, optimizer, real, noise):
    """Train the critic to tell real samples from generated ones."""
    optimizer.zero_grad()
    found = critic(torch.cat([real, generator(noise).detach()]))
    wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(noise), 1)])
    loss = bce(found, wanted)
    loss.backward()
    optimizer.step()
    return loss


def generator_step(critic, generator, optimizer, noise):
    """Train the generator to make samples that the critic takes for real."""
    optimizer.zero_grad()
    loss = bce(critic(generator(noise)), torch.ones(len(noise), 1))
    loss.backward()
    optimizer.step()
    return loss


def trained(parallelize, steps=6):
    """Return the losses of both, alternating."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))
    generator = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    real, noise = torch.randn(16, 8), torch.randn(16, 4)
    train_critic = parallelize(critic_step, critic, generator, of_critic, real, noise)
    train_generator = parallelize(generator_step, critic, generator, of_generator, noise)
    losses = []
    for _ in range(steps):
        real, noise = torch.randn(16, 8), torch.randn(16, 4)
        losses += [train_critic(real, noise).item(), train_generator(noise).item()]
    return losses


if __name__ == "__main__":
    losses = trained(pardnn.parallelize)
    if os.environ.get("RANK", "0") == "0":
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
