"""Entry points for tests of `run`: `FILE.py:FUNCTION`, as users write them."""

import os
import signal
import threading
import time

import torch
from torch import nn


def _step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def training(batch_size=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return _step, (model, optimizer, torch.randn(batch_size, 16), torch.randint(8, (batch_size,)))


def scheduled():
    """The step steps a schedule of the learning rate, too."""
    _, args = training()
    schedule = torch.optim.lr_scheduler.StepLR(args[1], 2)

    def step(model, optimizer, x, y):
        loss = _step(model, optimizer, x, y)
        schedule.step()
        return loss

    return step, args


def _counting_step(model, optimizer, x, y):
    model.seen.add_(1)
    return _step(model, optimizer, x, y)


def other_buffer_on_ranks():
    """No loss depends on the buffer."""
    _, (model, *rest) = training()
    model.register_buffer("seen", torch.full((3,), 1.0 if "RANK" in os.environ else 3.0))
    return _counting_step, (model, *rest)


def _on_rank_1(action):
    if os.environ.get("RANK") == "1":
        action()


def killed_while_building():
    _on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))
    return training()


def leaving_while_building():
    _on_rank_1(lambda: os._exit(0))
    return training()


def killed_while_training():
    """Rank 1 is killed in the middle of its sixth step."""
    from pardnn.backends.torch.runtime.executor import Executor

    def plant():
        step = Executor.step

        def killed(self, inputs):
            if len(self.step_s) == 5:
                middle = len(self._calls) // 2
                self._calls[middle] = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            return step(self, inputs)

        Executor.step = killed

    _on_rank_1(plant)
    return training()


def sleeping_while_building():
    _on_rank_1(lambda: time.sleep(100))
    return training()


def raising_while_building():
    def fail():
        raise ValueError("no data for rank 1")

    _on_rank_1(fail)
    return training()


def interrupted_while_building():
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    _on_rank_1(interrupt)
    return training()


def training_beside_a_thread():
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return training()


def large(batch_size=64):
    """400 MB of parameters, gradients and optimizer state."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(2048, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return _step, (model, optimizer, torch.randn(batch_size, 2048), torch.randint(8, (batch_size,)))
