"""Colours and figure files. The palette is that of Okabe and Ito: people with any colour vision can tell it apart."""

from __future__ import annotations

import io
import os
import re
from contextlib import contextmanager

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tmojax.problem.strict_json import write_text
from tmojax.report.activity import Category

BLACK, ORANGE, SKY, GREEN = "#000000", "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, VERMILLION, PURPLE = "#f0e442", "#0072b2", "#d55e00", "#cc79a7"
# Greys that read on white and on near-black; `inline_svg` turns the first two into variables of the page.
INK, GRID, GREY = "#24292f", "#d0d7de", "#8c959f"
STALL = "#f2c4a8"

CATEGORY_COLOUR = {
    Category.FORWARD: SKY,
    Category.BACKWARD: BLUE,
    Category.OPTIMIZER: PURPLE,
    Category.RECOMPUTE: ORANGE,
    Category.CODEC: YELLOW,
    Category.COLLECTIVE: GREY,
    Category.COPY_OUT: GREEN,
    Category.COPY_IN: "#7bccb0",
}
# In the order of memory_use.BYTE_KINDS.
BYTE_KIND_COLOUR = (BLUE, SKY, PURPLE, ORANGE, GREEN, GREY, YELLOW)
DEVICE_COLOUR = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, GREY)

_SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 9.0,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.linewidth": 0.7,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "tmojax",  # equal figures have equal bytes
}


@contextmanager
def figure_settings():
    """The look of all figures; both drawing and writing happen inside."""
    with matplotlib.rc_context(_SETTINGS):  # pyright: ignore[reportArgumentType]
        yield


def svg_text(figure: Figure) -> str:
    """The figure as SVG with real text and coordinates to 0.01 pt; images inside it have 200 dots per inch.

    The same figure gives the same text.
    """
    with figure_settings():
        FigureCanvasSVG(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", dpi=200, metadata={"Date": None, "Creator": None})
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path.group()), buffer.getvalue())


def write_svg(path: str | os.PathLike[str], svg: str) -> None:
    """Write SVG text as a file of its own, with a white background (temporary name, then rename)."""
    head, tag, rest = svg.partition("<svg ")
    write_text(path, f'{head}{tag}style="background:#ffffff" {rest}')


def write_png(path: str | os.PathLike[str], figure: Figure) -> None:
    """Write the figure as PNG on white, 150 dots per inch."""
    with figure_settings():
        FigureCanvasAgg(figure)
        figure.savefig(path, format="png", dpi=150, facecolor="white")


def inline_svg(svg: str, prefix: str) -> str:
    """SVG to stand inside an HTML page.

    Ids get `prefix`, so that several figures of one page do not share them; ink and grid take the colours of the page
    (`--ink`, `--grid`); the size follows the column.
    """
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg ") :], flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = body.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg \1 class="figure"', body, count=1)
