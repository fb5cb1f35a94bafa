"""What several benchmarks use."""

from pathlib import Path

#: Where the dated pages lie.
RESULTS = Path(__file__).parents[1] / "results"
#: Folder of the charts, beside the pages that show them.
CHARTS = "charts"


def write_chart(svg: str, folder: Path, name: str) -> None:
    """Write a chart to `charts/NAME.svg` below the folder of its page.

    Args:
        svg: The chart.
        folder: Of the page.
        name: Of the file, without its suffix.
    """
    path = folder / CHARTS / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, encoding="utf-8")
