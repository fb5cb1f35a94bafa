"""Lightning's `Trainer` with manual optimisation, its loop and callbacks.

torchrun --nproc-per-node 2 examples/lightning_module.py runs/a   # resumes if there is a checkpoint
"""

import sys

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pardnn

pardnn.connect()


class Classifier(pl.LightningModule):
    """A model, its optimizer and one training step, as Lightning expects them."""

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
    @pardnn.parallelize
    def step(net, optimizer, x, y):
        """Run forward, backward and the update."""
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def training_step(self, batch, _number):
        """Run one step."""
        self.losses.append(self.step(self.net, self.optimizers(), *batch).item())


directory = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None
pl.seed_everything(0, verbose=False)
module = Classifier()
data = TensorDataset(torch.randn(96, 16), torch.randint(4, (96,)))
saving = pl.callbacks.ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
quiet = dict.fromkeys(("logger", "enable_progress_bar"), False)
trainer = pl.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, callbacks=[saving], **quiet,
    strategy=pardnn.lightning_strategy(pl.strategies.SingleDeviceStrategy, Classifier.step),
)  # fmt: skip
trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True), ckpt_path=checkpoint)
if trainer.is_global_zero:
    print("losses", *(f"{loss:.6f}" for loss in module.losses))
