"""Planning options: one value, checked once, from the command line to the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pardnn.errors import UsageError, shown
from pardnn.plan.constraints import Constraint, cutting, placing
from pardnn.planner.algorithms import (
    ALGORITHMS,
    BEST,
    RECIPES,
    SHARDED,
    check_algorithm,
    cuts_ops,
    mixed_parts,
)
from pardnn.sim.engine import Policy

Objective = Literal["seconds", "period", "bytes"]
#: What every generator and solver takes.
MAX_SEED = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How to plan.

    Attributes:
        algorithm: A key of `ALGORITHMS` or `SHARDED`, or one of each, "megatron*1f1b", which cuts
            inside submeshes and places on them; "auto" for the best of all; or "auto-whole" for
            the best of `AUTO` only.
        microbatches: Pieces that the batch is cut in, or "auto" for what is fastest of 1, 2, 4, 8
            and so on; None leaves the batch whole.
        recompute: Whether ops may be called a second time, just before the backward pass reads
            their results, where that lets a step fit or makes it faster.
        offload: Whether optimizer state may live on the host and be copied to its device for the
            ops that use it, where that lets a step fit.
        constraints: Where ops must run, how tensors are cut, how many pieces there are.
        policy: How ready ops are scheduled: "order" follows the plan's own order; "fifo" and
            "priority" mean an engine that schedules them itself. Memory then also fits in an
            emulation of that engine, and no op is cut.
        objective: "seconds" minimises the makespan, "period" the time of a step among many, "bytes"
            the bytes sent.
        reserve: Fraction of each device's memory to leave unused.
        seed: Of the algorithm. The same input, options and seed give the same bytes of plan.
        time_limit: Seconds to search, once kernels are loaded; after that the best plan so far is
            taken. The result may then differ from run to run.
        costs: None: the ops' own `seconds` if they state them, else "measured" of a captured graph
            and "a100" of any other; or a preset. "measured" runs the graph's calls.
        threads: That an op may use on a CPU.

    Raises:
        UsageError: E210 (algorithm), E211 (reserve), E201 (objective, policy, seed), E246 (an
            algorithm or option that takes no constraints).
    """

    algorithm: str = "auto"
    objective: Objective = "seconds"
    reserve: float = 0.1
    seed: int = 0
    time_limit: float | None = None
    costs: str | None = None
    threads: int = 1
    policy: Policy = "order"
    microbatches: int | Literal["auto"] | None = None
    recompute: bool = False
    offload: bool = False
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        if not 0 <= self.reserve < 1:
            raise UsageError(
                f"reserve is {self.reserve}; it must be at least 0 and below 1", code="E211"
            )
        if self.objective not in get_args(Objective):
            raise UsageError(
                f"objective is {self.objective!r:.40}; it can be seconds, period or bytes"
            )
        if self.policy not in get_args(Policy):
            raise UsageError(f"policy is {self.policy!r:.40}; it can be order, fifo or priority")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed is {self.seed}; it must be a whole number from 0 to {MAX_SEED}")
        self._check_microbatches()
        if self.objective == "period" and (self.recompute or self.offload):
            asked = "recompute" if self.recompute else "offload"
            raise UsageError(
                f"with {asked}, plans are compared by makespan only, not yet by period; use the "
                "objective seconds."
            )
        if self.recompute:
            self._check_ordered("ops that are called a second time run in a fixed order")
        if self.offload:
            self._check_ordered("ops whose state is on the host run in a fixed order")
        if self.policy != "order" and cuts_ops(self.algorithm):
            raise UsageError(
                f"{self.algorithm} cuts ops, but an engine with its own scheduler runs whole "
                "ones; use auto or a placement algorithm."
            )
        self._check_constraints()

    @property
    def is_timed(self) -> bool:
        """Whether seconds are minimised, of one step or of one among many."""
        return self.objective != "bytes"

    def check_asked(self) -> None:
        """Check that an algorithm requested by name supports the requested objective.

        Plans derived from a plan take its algorithm and objective, however they were chosen.

        Raises:
            UsageError: E201.
        """
        chooses = self.microbatches == "auto" or self.algorithm not in (*ALGORITHMS, *RECIPES)
        if self.objective != "seconds" and not chooses:
            raise UsageError(
                f"{self.algorithm} minimises seconds, not {self.objective}; use auto, auto-whole "
                "or tofu, or leave the objective out."
            )

    def _check_constraints(self) -> None:
        """Check that the algorithm can meet the constraints that have to be met."""
        cut, placement = mixed_parts(self.algorithm) or (self.algorithm, self.algorithm)
        cuts = self.algorithm in SHARDED
        refused = placing(self.constraints) if cuts or placement in RECIPES else ()
        if cut not in (*SHARDED, BEST):
            refused += cutting(self.constraints)
        if refused:
            how = "cuts every op over all devices" if cuts else "places whole ops"
            how = "places stages" if placement in RECIPES else how
            raise UsageError(
                f"{self.algorithm} does not take constraints of this kind, as it {how}: "
                f"{shown(str(refused[0]))}.\nUse auto, or a "
                f"{'cutting' if cutting(refused[:1]) else 'placement'} algorithm.",
                code="E246",
            )
        if cutting(self.constraints) and self.policy != "order":
            raise UsageError(
                f"{shown(str(cutting(self.constraints)[0]))} cuts ops, but an engine under "
                f"{self.policy} runs whole ones"
            )
        if self.objective != "seconds" and any(e.price_s is not None for e in self.constraints):
            raise UsageError(
                f"preferences have a price in seconds per step; the objective is {self.objective}"
            )

    def _check_ordered(self, what: str) -> None:
        """Check that ops run in the plan's own order.

        Args:
            what: What needs this, for the message.
        """
        if self.policy != "order":
            raise UsageError(
                f"{what}, which policy {self.policy} does not keep; use the policy order."
            )

    def _check_microbatches(self) -> None:
        wanted = self.microbatches
        if wanted is None or wanted == 1:
            return
        if wanted != "auto" and wanted < 1:
            raise UsageError(
                f"microbatches is {wanted}; it must be a number of at least 1, or auto"
            )
        self._check_ordered("microbatches run in a fixed order")
