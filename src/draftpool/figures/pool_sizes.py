"""Regret against the number of drafters, and against the length of answers, by exact replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftpool.analysis.tidy import read_meta, read_tidy
from draftpool.figures import style


def draw(stats: Path, out: Path) -> None:
    """Draw regret over the pool's size (left) and over answers of few to many rounds (right).

    Reads regret_by_size, regret_by_length and meta.
    """
    meta = read_meta(stats)
    sizes = read_tidy(stats, "regret_by_size")
    sizes = sizes[sizes["metric"] == "relative"]
    lengths = read_tidy(stats, "regret_by_length")
    lengths = lengths[lengths["stream"] == "heldout"] if "heldout" in set(lengths["stream"]) else lengths
    selectors = list(sizes["selector"].unique())
    figure, axes = style.panels(1, 2, 3.4, sharey=True)
    for number, selector in enumerate(selectors):
        colour = style.COLOURS[number % len(style.COLOURS)]
        marker = "os^Dv<>"[number % 7]
        label = style.selector_label(selector, meta["generalist"])
        own = sizes[sizes["selector"] == selector].sort_values("size")
        _line(axes[0, 0], own["size"].to_numpy(dtype=float), own, colour, marker, label)
        own = lengths[lengths["selector"] == selector].sort_values("bin")
        middle = (own["rounds_low"] + own["rounds_high"]) / 2
        _line(axes[0, 1], middle.to_numpy(), own, colour, marker, label)
    axes[0, 0].set_xscale("log", base=2)
    ticks = sorted(sizes["size"].unique())
    axes[0, 0].set_xticks(ticks, [str(size) for size in ticks])
    axes[0, 0].minorticks_off()
    axes[0, 0].set_xlabel("drafters in the pool")
    axes[0, 0].set_ylabel("rounds beyond the best fixed\ndrafter's (share)")
    axes[0, 1].set_xlabel("rounds of the best fixed drafter (query)")
    for panel in axes[0]:
        panel.axhline(0, color="black", lw=0.8, ls="--")
    largest = sizes[sizes["size"] == sizes["size"].max()].set_index("selector")["value"]
    best = largest.idxmin()
    note = (
        f"Bars: {style.percent(meta['confidence'])} bootstrap intervals over {style.counts_text(sizes['n'])} prompts. "
        f"Left: up to {int(sizes['pools'].max())} drawn pools a size, the generalist in each. Right: the study's pool."
    )
    message = (
        f"With {int(ticks[-1])} drafters {style.selector_label(best)} loses {100 * largest[best]:.0f} % of the rounds, "
        f"{style.selector_label(largest.idxmax())} {100 * largest.max():.0f} %"
    )
    style.frame(figure, message, note, axes[0, 0], columns=4)
    style.save(figure, out)


def _line(panel, x: np.ndarray, rows, colour: str, marker: str, label: str) -> None:
    value = rows["value"].to_numpy()
    spread = np.abs(np.stack([value - rows["low"].to_numpy(), rows["high"].to_numpy() - value]))
    panel.errorbar(
        x,
        value,
        yerr=np.nan_to_num(spread),
        color=colour,
        marker=marker,
        ms=4,
        lw=1.2,
        capsize=2,
        label=label,
    )
