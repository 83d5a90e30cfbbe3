"""One look for all figures: colours safe for colour-blind readers, print sizes, reproducible files."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from draftpool.artefacts import atomic_path

# Okabe and Ito's palette, without its yellow, which is too pale for lines and dots on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F"]
MARKERS = ["o", "s", "D", "^", "v", "P", "X", "h"]
SEQUENTIAL = "YlGnBu"
GREY = "#7F7F7F"
WIDTH = 7.0  # inches: the text width of a two-column page

FAMILIES = {
    "learner": COLOURS[0],
    "fixed drafter": GREY,
    "no learning": COLOURS[4],
    "oracle": COLOURS[2],
    "plain": "#000000",
}
SELECTOR_LABELS = {
    "plain": "plain decoding",
    "random": "random",
    "ucb_bd": "MetaSD-UCB (BD)",
    "ucb_be": "MetaSD-UCB (BE)",
    "exp3": "EXP3",
    "hedge": "HedgeSpec (Hedge)",
    "hedgespec": "HedgeSpec",
    "normal_hedge": "HedgeSpec (NormalHedge)",
    "hedgespec_prefill": "HedgeSpec (as published)",
    "hedgespec_prefill_soft": "HedgeSpec (as published, soft)",
    "ucbspec": "UCBSpec",
    "cost_ucb": "UCB on tokens/s",
    "cost_hedge": "Hedge on tokens/s",
    "best_fixed_query": "best fixed per query (oracle)",
}
OBJECTIVE_LABELS = {
    "dpace": "D-PACE",
    "dflash": "DFlash",
    "uniform": "uniform",
    "head_dependent": "head-dependent",
    "dpace_cumulative": "D-PACE, cumulative only",
    "dpace_continuation": "D-PACE, continuation only",
    "direct_surrogate": "direct surrogate",
    "cross_entropy": "cross-entropy",
    "forward_kl": "forward KL",
    "reverse_kl": "reverse KL",
    "tvd": "total variation",
}

sns.set_theme(
    context="paper",
    style="ticks",
    rc={
        "figure.dpi": 100,
        "savefig.dpi": 200,
        "font.size": 8,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.labelsize": 8,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "pdf.fonttype": 42,
        "axes.spines.top": False,
        "axes.spines.right": False,
    },
)


def panels(
    rows: int, columns: int, height: float, width: float = WIDTH, **options: object
) -> tuple[Figure, np.ndarray]:
    """Make a figure of rows x columns panels, sizes in inches; axes are always an array [rows, columns]."""
    return plt.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options
    )


def frame(figure: Figure, title: str, note: str, legend: Axes | None = None, columns: int = 3) -> None:
    """Put the message above the panels, and one legend and the note on intervals and n below them.

    Each gets its own strip of the page, which the panels leave free.

    Args:
        figure: A figure of ``panels``.
        title: The message; wrapped.
        note: What bars mean and how many prompts there are; wrapped.
        legend: Axes whose labelled artists the legend lists; none without.
        columns: Columns of the legend.
    """
    width, height = figure.get_size_inches()
    title, note = textwrap.fill(title, int(13 * width)), textwrap.fill(note, int(19 * width))
    above = 0.08 + 0.17 * len(title.splitlines())
    below = 0.08 + 0.13 * len(note.splitlines())
    figure.text(0.01, 1 - 0.05 / height, title, fontsize=9, fontweight="bold", ha="left", va="top")
    figure.text(0.01, 0.05 / height, note, fontsize=7, color="#444444", ha="left", va="bottom")
    if legend is not None:
        handles, labels = legend.get_legend_handles_labels()
        columns = min(columns, len(labels))
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, below / height), "borderaxespad": 0.2}
        figure.legend(handles, labels, ncols=columns, **place).set_in_layout(False)
        below += 0.1 + 0.17 * -(-len(labels) // columns)
    figure.get_layout_engine().set(rect=(0, below / height, 1, 1 - (above + below) / height))


def readable_cells(axes: Axes) -> None:
    """Give each number of a heat map the ink, dark or white, that contrasts more with its cell; gaps have none."""
    cells = axes.collections[0]
    cells.update_scalarmappable()
    filled = cells.get_facecolors()[~np.ma.getmaskarray(cells.get_array()).ravel()]
    for text, colour in zip(axes.texts, filled, strict=True):
        linear = np.where(colour[:3] <= 0.04045, colour[:3] / 12.92, ((colour[:3] + 0.055) / 1.055) ** 2.4)
        text.set_color("black" if linear @ [0.2126, 0.7152, 0.0722] > 0.179 else "white")


def outline(axes: Axes, column: int, row: int) -> None:
    """Outline one cell of a heat map."""
    axes.add_patch(
        Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, fill=False, edgecolor=COLOURS[1], lw=1.8, zorder=3)
    )


def save(figure: Figure, out: Path) -> None:
    """Write PNG to ``out`` and PDF beside it, without dates or versions: same data, same bytes."""
    for kind, metadata in (
        ("png", {"Software": None}),
        ("pdf", {"CreationDate": None, "Creator": None, "Producer": None}),
    ):
        with atomic_path(Path(out).with_suffix(f".{kind}")) as temporary:
            figure.savefig(temporary, format=kind, metadata=metadata)
    plt.close(figure)


def run_label(name: str) -> str:
    """Readable form of a drafter run or recipe: ``generalist_dpace-s0`` -> ``generalist D-PACE s0``."""
    words = name.replace("_", " ").replace("-s", " s").split(" ")
    return " ".join({"dpace": "D-PACE", "dflash": "DFlash"}.get(word, word) for word in words)


def percent(share: float) -> str:
    """``0.95`` -> ``95 %``."""
    return f"{share * 100:.0f}\N{NO-BREAK SPACE}%"


def selector_label(name: str, generalist: str = "") -> str:
    """Readable form of a selector; the generalist's fixed arm is the one-size-fits-all baseline."""
    if name == f"fixed:{generalist}":
        return f"{run_label(generalist)} (one for all)"
    if name.startswith("fixed:"):
        return run_label(name.removeprefix("fixed:"))
    return SELECTOR_LABELS.get(name, name.replace("_", " "))


def family(selector: str) -> str:
    """Kind of a selector, for its colour."""
    if selector.startswith("fixed:"):
        return "fixed drafter"
    if selector == "plain":
        return "plain"
    if selector in ("random", "round_robin", "ensemble") or selector.startswith("router"):
        return "no learning"
    return "oracle" if selector.startswith(("best_", "oracle")) else "learner"


def objective_label(kind: str) -> str:
    """Readable form of an objective."""
    return OBJECTIVE_LABELS.get(kind, kind.replace("_", " "))


def draw_points(
    axes: Axes,
    where: np.ndarray,
    rows: pd.DataFrame,
    colour: str,
    marker: str = "o",
    horizontal: bool = False,
    **options: object,
) -> None:
    """Draw values with their intervals (columns value, low, high) as dots with bars."""
    value, low, high = (rows[column].to_numpy(float) for column in ("value", "low", "high"))
    bars = np.nan_to_num(np.maximum(0, [value - low, high - value]))
    look = {"fmt": marker, "color": colour, "ms": 4, "lw": 0, "elinewidth": 1.2, "capsize": 0} | options
    if horizontal:
        axes.errorbar(value, where, xerr=bars, **look)
    else:
        axes.errorbar(where, value, yerr=bars, **look)


def counts_text(n: pd.Series) -> str:
    """``n = 24`` or, where it differs, ``n = 20-24``."""
    low, high = int(n.min()), int(n.max())
    return f"n = {low}" if low == high else f"n = {low}-{high}"


def brackets(row: pd.Series, sign: str = "", digits: int = 2) -> str:
    """``[0.10, 0.20]``, or ``(no interval)`` where too few prompts allow none."""
    if np.isnan(row["low"]) or np.isnan(row["high"]):
        return "(no interval)"
    return f"[{row['low']:{sign}.{digits}f}, {row['high']:{sign}.{digits}f}]"


def half_width(rows: pd.DataFrame, factor: float = 1.0, digits: int = 2) -> str:
    """Median half-width of the intervals, for figures whose cells cannot show them."""
    median = float(((rows["high"] - rows["low"]) / 2).median() * factor)
    return "none (too few prompts)" if np.isnan(median) else f"median half-width {median:.{digits}f}"
