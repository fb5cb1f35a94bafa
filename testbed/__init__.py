"""What tests and benchmarks share: models, captured graphs, made-up graphs, calls of operators.

- `zoo`: the models of the papers, one PyTorch file each (`zoo/README.md`). `small_models`: one
  small model of each kind, to train in a test.
- `graphs`: captured steps of the zoo. Beside them `graphs/batch` has the rules that give their
  sizes at other batches, and `graphs/checkpointed` two models with gradient checkpointing.
  `kept_graphs` loads the captured steps and captures them again.
- Made-up graphs: `families` (random, shaped like networks, of any size), `small_graphs`
  (8 to 20 ops, for proven optima), `hand_graphs` (MLP, convolution and chains of products, op by
  op), `large_graphs` (arrays alone, up to millions of ops).
- `op_samples`, `op_samples_layers`, `op_draw`: random calls of operators.
- `naive_bytes`: the bytes that a sharding moves, counted element by element.
- `two_nodes`: torchrun on two network namespaces, over a `slow_link`.
- `data`: lists of operators, and the published placement problems of msr-fiddle.
"""

from pathlib import Path

#: Lists of operators and published placement problems.
DATA = Path(__file__).parent / "data"
#: Captured steps, gzipped.
GRAPHS = Path(__file__).parent / "graphs"
