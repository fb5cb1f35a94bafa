"""The command `layout`; `cli` adds it to the others."""

from __future__ import annotations

from pardnn.cli import options as opt
from pardnn.cli.output import print_text, show
from pardnn.errors import UsageError


def layout(
    plan_file: opt.PlanFile,
    graph_file: opt.GraphOption,
    output: opt.OptionalOutput = None,
    as_json: opt.Json = False,
) -> None:
    """Show how a plan that cuts ops lays out every weight and activation; -o draws it (SVG)."""
    from pardnn import files
    from pardnn.graph.file import read_graph
    from pardnn.plan.check import check_plan
    from pardnn.plan.file import check_fingerprint, read_plan
    from pardnn.report.layout import layout_result, layout_svg, layout_text

    graph, plan = read_graph(graph_file), read_plan(plan_file)
    check_fingerprint(plan, graph)
    if plan.partition is None:
        raise UsageError(
            f"plan {str(plan_file)!r} by {plan.algorithm} places whole ops, so no tensor is cut.\n"
            "Make one that cuts them: pardnn plan TARGET --devices K --algorithm tofu.",
            code="E217",
        )
    check_plan(graph, plan)
    result = layout_result(graph, plan)
    if output is not None:
        title = f"{graph.name} by {plan.algorithm} on {plan.num_devices} devices"
        files.write_bytes(output, layout_svg(title, result).encode())
    if not as_json:
        print_text(layout_text(result))
    show(result, as_json, f"picture written to {output}" if output else None, shown=True)
