"""Options that say nothing beside the others are refused instead of ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pardnn.cli import cluster_options as machines
from pardnn.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

    from pardnn.cluster import Cluster

#: What says nothing without `--devices`.
_OF_DEVICES = ("max_memory", "bandwidth", "latency", "links")
#: How a plan is made: of no use to one that is read.
OF_PLANNING = (
    "algorithm", "objective", "reserve", "seed", "time_limit", "costs", "microbatches",
    "recompute", "offload", "start", "constraints", "pin", "forbid", "together", "apart", "layout",
    "pieces", "prefer",
)  # fmt: skip
#: Why they would be ignored.
WITH_A_PLAN = "the plan is already made. Leave out these options or --plan."


def refuse_unused(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise if an option was given that says nothing beside the others.

    Args:
        context: Of the command.
        names: Of its parameters.
        why: The rest of a sentence that begins with the options.

    Raises:
        UsageError: E206.
    """
    flags = {each.name: max(each.opts, key=len) for each in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [flags[name] for name, at in sources.items() if at is not None and at.name != "DEFAULT"]
    if given:
        raise UsageError(f"{', '.join(given)} would be ignored: {why}", code="E206")


def cluster_beside_plan(context: typer.Context, given: machines.ClusterOptions) -> Cluster | None:
    """Return the cluster that the options describe; None, the plan's own, without any.

    Args:
        context: Of the command.
        given: What `cluster_from_options` takes.

    Raises:
        UsageError: E205, if they contradict each other; E206, if they describe no devices.
    """
    if given.devices is None and given.cluster is None:
        why = "the devices are those of the plan. Add --devices K to describe others."
        refuse_unused(context, _OF_DEVICES, why)
        return None
    return machines.cluster_from_options(*given)
