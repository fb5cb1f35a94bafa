"""The charts of the pages: lines, groups of bars and rows of dots, drawn by matplotlib as SVG.

The same values give the same bytes under the same matplotlib: ids are hashed with a fixed salt, and
no date is written. Text stays text. Colours are those of Okabe and Ito, which colour-blind readers
can tell apart; each line and each kind of dot also has a marker of its own, and each bar its
number, so that nothing depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import cycle
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: Groups of bars side by side; further ones are drawn below them.
MOST_GROUPS = 6
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "font.size": 10,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pardnn",
}


class Line(NamedTuple):
    """One line of a chart.

    Attributes:
        name: What the legend says.
        points: Positive values by their positive place on the horizontal axis.
        colour: Number of its colour and marker; lines that belong together share it.
        dashed: For comparison: drawn thin, without markers.
        named: Whether the legend has it.
    """

    name: str
    points: Mapping[int, float]
    colour: int
    dashed: bool = False
    named: bool = True


class Bar(NamedTuple):
    """One bar: its height, and the few characters above it."""

    height: float
    label: str


def lines_svg(
    title: str, note: str, lines: Sequence[Line], *, axes: tuple[str, str], base: int
) -> str:
    """Return lines over two logarithmic axes; the legend has the highest line first.

    Args:
        title: Says what is drawn.
        note: A smaller line below the title.
        lines: At least one, with at least one point.
        axes: What is on the horizontal and on the vertical axis, with units.
        base: Of both logarithms: ticks are its powers.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(8.0, 4.4), layout="constrained")
        plot = figure.add_subplot()
        for line in sorted(lines, key=_last_value, reverse=True):
            _draw_line(plot, line)
        for axis, label in zip((plot.xaxis, plot.yaxis), axes, strict=True):
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_locator(LogLocator(base=base))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_label_text(label)
        _legend_beside(plot)
        return _svg(figure, plot, title, note)


def _last_value(line: Line) -> float:
    return line.points[max(line.points)]


def _draw_line(plot: Axes, line: Line) -> None:
    places = sorted(line.points)
    plot.plot(
        places,
        [line.points[place] for place in places],
        color=COLOURS[line.colour % len(COLOURS)],
        label=line.name if line.named else None,
        linestyle="--" if line.dashed else "-",
        linewidth=1.0 if line.dashed else 2.0,
        marker="" if line.dashed else MARKERS[line.colour % len(MARKERS)],
        markersize=5,
    )


def bars_svg(
    title: str, note: str, groups: Sequence[str], bars: Mapping[str, Sequence[Bar]]
) -> str:
    """Return groups of bars whose heights are shares, with a scale in percent.

    Args:
        title: Says what is drawn.
        note: A smaller line below the title.
        groups: Their names, from left to right.
        bars: By name, from left to right in each group: one for each group.
    """
    panels = range(0, len(groups), MOST_GROUPS)
    with rc_context(STYLE | {"axes.grid.axis": "y", "xtick.bottom": False}):
        bars_wide = min(len(groups), MOST_GROUPS) * (len(bars) + 1)
        figure = Figure(figsize=(1.0 + 0.3 * bars_wide, 1.0 + 2.6 * len(panels)))
        figure.set_layout_engine("constrained")
        plots = figure.subplots(len(panels), squeeze=False)[:, 0]
        for plot, first in zip(plots, panels, strict=True):
            end = first + MOST_GROUPS
            _draw_bars(plot, groups[first:end], {name: bars[name][first:end] for name in bars})
        figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
        return _svg(figure, plots[0], title, note)


def _draw_bars(plot: Axes, groups: Sequence[str], bars: Mapping[str, Sequence[Bar]]) -> None:
    width = 1 / (len(bars) + 1)
    for number, (name, row) in enumerate(bars.items()):
        drawn = plot.bar(
            [place + number * width for place in range(len(groups))],
            [bar.height for bar in row],
            width=0.9 * width,
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
        plot.bar_label(drawn, [bar.label for bar in row], padding=1, fontsize=7)
    middle = width * (len(bars) - 1) / 2
    plot.set_xticks([place + middle for place in range(len(groups))], groups)
    plot.set_xlim(-width, len(groups) - width)
    plot.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))


def dots_svg(title: str, note: str, rows: Mapping[str, Mapping[str, float]], *, axis: str) -> str:
    """Return a row per name with a dot per series, over a logarithmic axis that begins at 1.

    Args:
        title: Says what is drawn.
        note: A smaller line below the title.
        rows: By name from top to bottom, values from 1 on by series; a value may be missing.
        axis: What is on the horizontal axis.
    """
    with rc_context(STYLE | {"ytick.left": False}):
        figure = Figure(figsize=(7.5, 1.6 + 0.26 * len(rows)), layout="constrained")
        plot, names = figure.add_subplot(), list(rows)
        series = list(dict.fromkeys(each for row in rows.values() for each in row))
        for each, colour, marker in zip(series, cycle(COLOURS), cycle(MARKERS), strict=False):
            there = [name for name in names if each in rows[name]]
            values = [rows[name][each] for name in there]
            plot.scatter(values, there, label=each, color=colour, marker=marker, s=36, alpha=0.85)
        plot.set_yticks(range(len(names)), names)
        plot.invert_yaxis()
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.25, 1.5)))
        plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        plot.set_xlim(left=0.97)
        plot.set_xlabel(axis)
        _legend_beside(plot)
        return _svg(figure, plot, title, note)


def _legend_beside(plot: Axes) -> None:
    plot.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0)


def _svg(figure: Figure, plot: Axes, title: str, note: str) -> str:
    plot.set_title(title, fontsize=12, pad=22)
    plot.annotate(note, (0, 1), (0, 8), "axes fraction", "offset points", color="#555555", size=9)
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    # matplotlib ends some lines with a blank.
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())
