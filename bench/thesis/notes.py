"""The prose of the page: what the figures are, and why some differ from the thesis's."""

from collections.abc import Collection

HEAD = """\
Qararyah, *A computational-graph partitioning method for training memory-constrained DNNs*,
chapter 6. **Simulated**, all but the planning times: no V100 was used. Steps are captured from
PyTorch at full size (`testbed/zoo/`, `testbed/graphs/`), their sizes at other batches are affine
between two captures (`pardnn.api.batch_scaling`), op times are the `v100` preset's roofline, links
are NVSwitch's 300 GB/s and 25 us, 10 % of each device's memory stays in reserve. Planning times
are CPU seconds after the kernels are compiled.
"""

#: Where figures differ from the thesis's, and why: the parts that bear it, and the words.
DISAGREEMENTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("search",),
        """\
- **One device takes much larger batches here** (Table 6.1), so the batch grows less with the
  devices, and ParDNN's lead over ideal data parallelism shrinks. Why is open. One gradient of a
  weight per use until all are added (TensorFlow 1.14, as far as we can tell) would explain the
  recurrent models: for Word-RNN 28 steps x 8 layers x 134 MB = 30 GB, whatever the batch. It does
  not explain WRN and TRN, which use each weight once. What the engine keeps for itself, what its
  FIFO order holds at once (`simulate --policy fifo` shows that share) and the workspaces of its
  kernels could; none of them was measured on the thesis's machine.
""",
    ),
    (
        ("search",),
        """\
- **The batch of Word-RNN stops growing**: its softmax over all steps is one op, and from some
  batch on no device holds what this op reads and writes. No placement of whole ops can pass that.
""",
    ),
    (
        ("search",),
        """\
- **TRN on one device** needs each update to run as soon as its gradient is there: parameters,
  gradients and Adam's state are 30 GiB together, without the gradients 23. The memory-saving orders
  of the planner do that, since they follow chains of ops that free in the end what they take.
""",
    ),
    (
        ("search",),
        """\
- **Models of use case 2 that fit fewer devices**: Word-RNN-2 for the same reason as Word-RNN;
  E3D-2 has a third of the published parameters, which seem to count Adam's moments
  (`testbed/zoo/e3d.py`).
""",
    ),
    (
        ("search", "given"),
        """\
- **Speed-ups** at the largest batch are smaller than the thesis's superlinear ones, because one
  device is already well used at its larger batch; at the thesis's own batches they are shown
  separately. They are bounded by the degree of parallelism in both.
""",
    ),
    (
        ("given",),
        """\
- **WRN hardly gains** from more devices, and TRN and E3D little beyond their degree of parallelism:
  a step's critical path does not get shorter, and what larger batches add in utilisation, the
  roofline grants to one device too once its batch is large.
""",
    ),
    (
        ("shapes",),
        """\
- **The CCR of TRN** is lower than the thesis's. ATen makes fewer and larger ops of its attention
  and losses, so fewer edges carry the same activations; we cannot say more from a printed number.
""",
    ),
    (
        ("baselines",),
        """\
- **A hand-written tensor-parallel transformer is faster**, but for two samples; the thesis finds
  ParDNN on par with Mesh-TensorFlow. It splits each product over all devices and so is not bounded
  by the degree of parallelism, and its all-reduces run at the full rate of NVSwitch here, which no
  measured all-reduce does.
""",
    ),
    (
        ("steps",),
        """\
- **Round robin is less bad**, and refinement worth less: parameters, optimizer state and updates
  are one group here and cannot be separated, views are no ops that could be dealt out, transfers
  are sent once per device and do not contend, and bottom levels order what the thesis leaves to
  TensorFlow's FIFO.
""",
    ),
    (
        ("cut",),
        """\
- **Cut instead of placed**, seven of the thesis's ten models are up to 3 times as fast on four
  devices, most where little can run side by side (WRN): a cut has no critical path of whole ops.
  Models of many small ops gain nothing or lose (Char-CRN, Char-CRN-2, TRN-2 with two samples): each
  piece still takes an op's least time.
""",
    ),
    (
        ("steps",),
        """\
- **Linear clustering takes seconds**, not hours: it is another implementation of it.
""",
    ),
    (
        ("search",),
        """\
- **More ops are moved** by the memory step: it does not repair one placement, it also starts anew
  from placements packed by memory, and counted is every op that ends on another device than
  without limits.
""",
    ),
    (
        ("baselines",),
        """\
- **Data parallelism**, where it fits, is often faster than ParDNN here: it needs no transfers
  within the step and each replica is well used. Where each replica's share of the batch is small,
  ParDNN wins. The thesis compares batch sizes with it, not throughput.
""",
    ),
    (
        ("baselines",),
        """\
- **Unified memory** is an optimistic model (no cost per fault, no second copy), so ParDNN's lead
  over it is a lower bound.
""",
    ),
)


def disagreements(parts: Collection[str]) -> str:
    """Return what is said of a page that has these parts, and of no figure that it lacks."""
    said = [
        text.rstrip() for needed, text in DISAGREEMENTS if all(part in parts for part in needed)
    ]
    return "\n".join(["## Where this differs from the thesis, and why", "", *said, ""])
