"""The quick part of `placement`, a few minutes on one core; the others by their names.

- Placement: `placement` compares algorithms, `pipelines` plans pipelines beside schedules that
  experts draw by hand, `msr-fiddle` plans published placement problems, `limits` finds the least
  limit of each algorithm, `recompute` compares second calls of ops with CP-SAT, `checkpointing`
  with `torch.utils.checkpoint` on every block, `scale` times
  planning up to a million ops, `thesis` regenerates the tables of the ParDNN thesis,
  `state-in-place` says what leaving state where it is costs, `start` what planning from an earlier
  plan brings, `overrun` how far planning goes beyond its time limit.
- Sharding: `tofu` regenerates figures of the Tofu paper in simulation, `tofu-in-place` measures
  what adding gradients up in place would bring (`--whole`: to plans of whole ops),
  `tofu-search` the search of shardings, `tofu-equality` compares sharded training with one device,
  `coverage` cuts what torch's own samples of its operators call.
- `auto` is timed beside every algorithm that `compare` lists, in simulation.
- `recipes` times the cuts of experts beside `tofu` and `auto`, in simulation; `corners` times every
  recipe beside `auto` where links are slow and memory is short; `mixed` plans that cut and place
  beside those that do one of both; `zoo` times `auto` beside all of these, on models, clusters and
  limits of many kinds.
- The runtime: `capture` times capturing, `capture-zoo` captures the models of `testbed/zoo` again,
  `checkpoint` measures saving and loading beside `dd`, `collectives` gloo's collectives and
  messages, `fidelity` compares predicted with measured steps, `steps` our steps with those of DDP
  and FSDP2, `numbers` plans of every kind with one device, `guards` measures what a call costs
  beside its step, `pages` what a memory limit does, `two-nodes` compares plans that know a slow
  link with plans that do not, `mixed-ranks` measures plans that are predicted to be faster.
- `sweep` captures, places and cuts some 300 models and idioms, and changes values between calls.
- `mutants` plants small faults in the algorithms and counts those that tests find (`make mutants`).
- `plan-bytes` prints fingerprints of graphs and plans: a refactoring changes none.
"""

import importlib
import sys

NAMED = {
    "auto": "bench.placement.auto",
    "capture": "bench.runtime.capture",
    "capture-zoo": "testbed.kept_graphs",
    "checkpoint": "bench.runtime.checkpoint",
    "checkpointing": "bench.recompute.checkpointing",
    "collectives": "bench.runtime.collectives",
    "corners": "bench.recipes.corners",
    "coverage": "bench.tofu.opinfo",
    "fidelity": "bench.runtime.fidelity",
    "guards": "bench.runtime.guards",
    "limits": "bench.placement.boundary",
    "mutants": "bench.mutants.main",
    "msr-fiddle": "bench.placement.msr_fiddle",
    "mixed": "bench.recipes.mixed",
    "pipelines": "bench.placement.pipelines",
    "numbers": "bench.runtime.numbers",
    "overrun": "bench.placement.overrun",
    "placement": "bench.placement.main",
    "pages": "bench.runtime.pages",
    "plan-bytes": "bench.common.plan_bytes",
    "recipes": "bench.recipes.main",
    "recompute": "bench.recompute.main",
    "scale": "bench.placement.scale",
    "thesis": "bench.thesis.main",
    "start": "bench.placement.start",
    "state-in-place": "bench.placement.state_in_place",
    "steps": "bench.runtime.steps",
    "sweep": "bench.sweep.main",
    "tofu": "bench.tofu.main",
    "tofu-equality": "bench.runtime.equality",
    "tofu-in-place": "bench.tofu.in_place",
    "tofu-search": "bench.tofu.search",
    "mixed-ranks": "bench.runtime.mixed_ranks",
    "two-nodes": "bench.runtime.two_nodes",
    "zoo": "bench.recipes.zoo",
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in NAMED:
        sys.argv[0] = f"python -m bench {sys.argv[1]}"  # what argparse calls it
        importlib.import_module(NAMED[sys.argv[1]]).main(sys.argv[2:])
    elif sys.argv[1:2] in (["-h"], ["--help"]):
        sys.stdout.write(f"usage: python -m bench [NAME [options]]\n\n{__doc__}")
    elif sys.argv[1:]:
        sys.exit(f"no benchmark {sys.argv[1]!r:.40}; there are {', '.join(NAMED)}")
    else:
        from bench.placement import main

        main.main(["--ops", "1000", "--devices", "4,16", "--scale", "1000,10000"])
