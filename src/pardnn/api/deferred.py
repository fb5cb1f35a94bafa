"""`pardnn.deferred`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pardnn import backends


def deferred() -> AbstractContextManager[None]:
    """Return a context in which models and optimizers are built without allocating them.

    `parallelize` then initialises on each rank its own shards only, with the numbers that one
    device would have drawn::

        with pardnn.deferred():
            model = Transformer(config)
            optimizer = torch.optim.AdamW(model.parameters())
        fast_step = pardnn.parallelize(step, model, optimizer, x, y)

    Raises:
        UnsupportedError: E820, something inside cannot be recorded; it names the line.
    """
    return backends.deferred()
