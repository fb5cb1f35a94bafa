"""Lightning's `Trainer` on several ranks, by manual optimisation: its loop and callbacks, our step.

Run it with `torchrun --nproc-per-node 2 examples/lightning_module.py`.
"""

import os

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pardnn


class Classifier(pl.LightningModule):
    """A model, its optimizer and one training step, as Lightning wants them."""

    def __init__(self):
        """Build the network."""
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
        self.losses = []

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    @staticmethod
    def step(net, optimizer, x, y):
        """Forward, backward and update."""
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def training_step(self, batch, _number):
        """Do one step on one device."""
        self.losses.append(self.step(self.net, self.optimizers().optimizer, *batch).item())


class DistributedClassifier(Classifier):
    """The same on all ranks."""

    fast_step = None

    def training_step(self, batch, _number):
        """Do one step on all ranks."""
        if self.fast_step is None:
            optimizer = self.optimizers().optimizer
            self.fast_step = pardnn.parallelize(self.step, self.net, optimizer, *batch)
        self.losses.append(self.fast_step(*batch).item())


def trained(kind):
    """Return the losses of a module of some kind."""
    pl.seed_everything(0, verbose=False)
    module = kind()
    data = TensorDataset(torch.randn(96, 16), torch.randint(4, (96,)))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet)
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True))
    return module.losses


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        # Ranks find each other here; Lightning itself shall not spread the data.
        dist.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    losses = trained(DistributedClassifier)
    if rank == 0:
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
