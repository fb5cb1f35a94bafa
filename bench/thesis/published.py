"""What the ParDNN thesis publishes (Qararyah, chapters 5 and 6), to stand beside what is measured.

V100 32 GB x 16 behind NVSwitch, TensorFlow 1.14. Numbers that are only drawn in its figures are
not here; those that its text states are.
"""

from __future__ import annotations

from typing import NamedTuple

#: Numbers of devices of Table 6.1.
DEVICES = (1, 2, 4, 8, 16)


class Published(NamedTuple):
    """One model of the thesis.

    Attributes:
        graph: Name of the captured graph in `testbed/graphs/`.
        ops: Nodes of its TensorFlow graph, Table 5.1.
        batch: Largest batch by number of devices, Table 6.1.
    """

    graph: str
    ops: int
    batch: dict[int, int]


def _first(*batch: int) -> dict[int, int]:
    return dict(zip(DEVICES, batch, strict=True))


def _second(*batch: int) -> dict[int, int]:
    return dict(zip(DEVICES[2:], batch, strict=True))


#: Use case 1 of the thesis fits one device with a small batch, use case 2 (`-2`) does not.
MODELS = {
    "Word-RNN": Published("word_rnn", 10_578, _first(16, 512, 1024, 2048, 2048)),
    "Char-CRN": Published("char_crn", 22_748, _first(8, 256, 512, 1024, 2048)),
    "WRN": Published("wrn_610_14", 187_742, _first(1, 4, 16, 32, 64)),
    "TRN": Published("trn", 80_550, _first(1, 32, 64, 128, 256)),
    "E3D": Published("e3d", 55_756, _first(1, 4, 16, 32, 64)),
    "Word-RNN-2": Published("word_rnn_2", 10_578, _second(32, 1024, 2048)),
    "Char-CRN-2": Published("char_crn_2", 86_663, _second(128, 512, 1024)),
    "WRN-2": Published("wrn_304_28", 79_742, _second(4, 16, 32)),
    "TRN-2": Published("trn_2", 160_518, _second(2, 16, 32)),
    "E3D-2": Published("e3d_2", 55_756, _second(8, 16, 32)),
}

#: Seconds of planning that section 6.4.1 states: the shortest and the longest of all.
PLANNING_S = {"Word-RNN, K = 2": 18.0, "TRN-2, K = 16": 117.0}
#: Seconds without step 2 that section 6.4.2 states: (ParDNN, linear clustering).
CLUSTERING_S = {"Word-RNN": (6.0, 192.0), "WRN": (36.0, 4.5 * 3600)}
#: Share of the ops that the memory step moves, on average (6.4.1).
MOVED = 0.08
#: CCR at the 4-GPU batch sizes (6.2.2), and of Word-RNN by batch size.
CCR = {"TRN": 1.58, "WRN": 0.59}
CCR_WORD_RNN = {256: 0.67, 2048: 0.17}
#: Speed-up over round robin, and what refinement adds (6.4.1).
OVER_ROUND_ROBIN = 2.0
REFINEMENT = (0.05, 0.25)
#: Largest makespan of ParDNN over linear clustering's: TRN on 4 (6.4.2).
OVER_CLUSTERING = 1.0009
