"""The commands about files: third-party formats, layouts, reports, schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pardnn.cli import cluster_options as machines
from pardnn.cli import options as opt
from pardnn.cli import unused_options as unused
from pardnn.cli.output import print_text, show
from pardnn.errors import UsageError, shown

#: Kinds of pictures that people ask for by a file's name, and that are not written.
_OTHER_PICTURES = (".png", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".eps", ".ps")


def convert(
    context: typer.Context,
    *,
    source: Annotated[Path, typer.Argument(metavar="IN", help="Graph, plan or placement.")],
    output: Annotated[Path | None, typer.Argument(metavar="OUT", help="File to write.")] = None,
    output_option: opt.OptionalOutput = None,
    graph_file: Annotated[
        Path | None, typer.Option("--graph", help="Graph file of a plan, placement or split.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Format, if there is a choice: pardnn.plan/1, placement, msr-fiddle-split.",
        ),
    ] = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option("--write-cluster", help="File for the cluster of an msr-fiddle input."),
    ] = None,
    given: machines.ClusterOptions,
    reserve: opt.Reserve = 0.1,
    costs: opt.CostChoice = None,
    as_json: opt.Json = False,
) -> None:
    """Convert graphs, plans and placements between formats."""
    from pardnn.api.convert import ConvertOptions
    from pardnn.api.convert import convert as convert_file

    if (output is None) == (output_option is None):
        raise UsageError("name one file to write: pardnn convert IN OUT")
    machine = unused.cluster_beside_plan(context, given)
    options = ConvertOptions(
        to=to,
        graph_file=graph_file,
        cluster=machine,
        cluster_file=cluster_file,
        planning=opt.plan_options(reserve=reserve, costs=costs),
    )
    target = output or output_option
    assert target is not None
    show(convert_file(source, target, options), as_json, None)


def layout(
    plan_file: opt.PlanFile,
    graph_file: opt.GraphOption = None,
    output: opt.OptionalOutput = None,
    as_json: opt.Json = False,
) -> None:
    """Show how a cut plan lays out weights and activations. -o draws it (SVG)."""
    from pardnn import files
    from pardnn.api.simulate import check_plan
    from pardnn.plan.file import check_fingerprint
    from pardnn.report.layout import layout_result, layout_text
    from pardnn.report.layout_picture import layout_svg

    _check_picture(output)
    graph, plan = opt.read_both(graph_file, plan_file)
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


def _check_picture(output: Path | None) -> None:
    """Raise if a name asks for a picture of another kind than is drawn.

    Raises:
        UsageError: E201.
    """
    if output is not None and output.suffix.lower() in _OTHER_PICTURES:
        raise UsageError(
            f"pictures are SVG, not {output.suffix[1:].upper()}.\n"
            f"Write it to {shown(str(output.with_suffix('.svg')))}; browsers print it to PDF."
        )


def report(
    plan_file: opt.PlanFile,
    *,
    graph_file: opt.GraphOption = None,
    output: opt.Output,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Also show what `run --record` measured."),
    ] = None,
    costs: opt.PlanCosts = None,
    as_json: opt.Json = False,
) -> None:
    """Write a plan as one offline HTML page. Show times, memory, modules and messages."""
    from pardnn import files
    from pardnn.api.report import report as report_plan
    from pardnn.report.page.contents import ReportResult
    from pardnn.report.page.html import page_html

    found = report_plan(*opt.read_both(graph_file, plan_file), costs=costs, run=run)
    page = page_html(found).encode(errors="replace")
    files.write_bytes(output, page)
    result = ReportResult(
        output=str(output),
        bytes=len(page),
        makespan_s=found.times.makespan_s,
        binds=tuple(each.text for each in found.binds),
    )
    show(result, as_json, f"report written to {output}: open it in a browser")


def export(
    plan_file: opt.PlanFile,
    *,
    graph_file: opt.GraphOption = None,
    output: opt.Output,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="perfetto, chrome, model-explorer, dot, mermaid, or pp-csv (pipelines).",
            autocompletion=opt.one_of(
                "perfetto", "chrome", "model-explorer", "dot", "mermaid", "pp-csv"
            ),
        ),
    ],
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Also show what `run --record` measured."),
    ] = None,
    costs: opt.PlanCosts = None,
    as_json: opt.Json = False,
) -> None:
    """Write a plan in another tool's format."""
    from pardnn import files
    from pardnn.api.report import export as export_plan
    from pardnn.report.export.result import ExportResult

    graph, plan = opt.read_both(graph_file, plan_file)
    content = export_plan(graph, plan, to, run=run, costs=costs)
    files.write_bytes(output, content)
    result = ExportResult(output=str(output), format=to, bytes=len(content))
    show(result, as_json, f"{to} written to {output}")


def draw(
    plan_file: opt.PlanFile,
    *,
    graph_file: opt.GraphOption = None,
    output: opt.Output,
    costs: opt.PlanCosts = None,
    as_json: opt.Json = False,
) -> None:
    """Draw what each device computes and holds over time (SVG)."""
    from pardnn import files
    from pardnn.api.draw import draw_plan
    from pardnn.plan.plan import planned_graph
    from pardnn.planner.check_cut import proven_cluster
    from pardnn.planner.costs import choice_of, costs_for
    from pardnn.report.export.result import ExportResult

    _check_picture(output)
    graph, plan = opt.read_both(graph_file, plan_file)
    cluster = proven_cluster(graph, plan)
    choice = choice_of(plan, costs, graph, planned_graph(graph, plan))
    known = costs_for(graph, cluster, choice)
    content = draw_plan(graph, plan, known).encode(errors="replace")
    files.write_bytes(output, content)
    result = ExportResult(output=str(output), format="svg", bytes=len(content))
    show(result, as_json, f"picture written to {output}")


def schema(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A command, or a format such as pardnn.plan/1. Default: all."
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of all files and --json objects."""
    from pardnn.api.schemas import json_schemas

    found = json_schemas()
    if name is not None and name not in found:
        raise UsageError(f"no schema {name!r:.40}; there are {', '.join(found)}")
    typer.echo(json.dumps(found if name is None else found[name], indent=1))
