"""Gradient checkpointing by torch's own means, captured: the baseline of the thesis's Fig. 6.4.

Each residual unit of WRN and each layer of the transformer keeps its inputs only and is computed
again in the backward pass (`torch.utils.checkpoint`). For the transformer the second computation
draws its dropout anew instead of setting the generator back, which capture refuses (E801): the
calls, their times and their bytes are the same.

`python -m bench.thesis.checkpoint` captures them, or those named, into
`testbed/graphs/checkpointed/` and writes their rules.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.thesis.batch import again_paths, made_family, write_rule
from testbed.zoo import trn, wrn

#: Name of the graph whose checkpointed form it is: function here, batch size, samples more for the
#: rule.
GRAPHS = {
    "wrn_610_14": ("wrn_checkpointed", 4, 4),
    "trn": ("trn_checkpointed", 8, 8),
}


class Again(nn.Module):
    """A part of a model that is computed again in the backward pass."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, *inputs):
        """Return what the part returns."""
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return again(self.part, *inputs)


def wrn_checkpointed(batch_size=1):
    """WRN-610-14, its units computed twice."""
    step, (model, _, images, labels) = wrn.wrn_610_14(batch_size=batch_size)
    model.groups = nn.Sequential(*map(Again, model.groups))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    return step, (model, optimizer, images, labels)


def trn_checkpointed(batch_size=1):
    """TRN, its layers computed twice."""
    step, (model, _, *sentences) = trn.trn(batch_size=batch_size)
    model.encoder = nn.ModuleList(map(Again, model.encoder))
    model.decoder = nn.ModuleList(map(Again, model.decoder))
    return step, (model, torch.optim.Adam(model.parameters(), lr=3e-4), *sentences)


def main(names):
    """Capture the named graphs, or all, at two batch sizes each."""
    from pardnn.api.capture import captured
    from pardnn.backends.entry_point import load_entry_point
    from pardnn.graph.file import write_graph

    for name in names or GRAPHS:
        function, size, more = GRAPHS[name]
        entry = load_entry_point(f"{Path(__file__).resolve()}:{function}")
        low = captured(entry, size)[0]
        graph, rule = again_paths(name)
        graph.parent.mkdir(exist_ok=True)
        write_graph(low, graph)
        high = captured(entry, size + more)[0]
        write_rule(made_family(low, size, high, size + more), rule)
        print(f"{name}: {len(low.ops)} ops", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
