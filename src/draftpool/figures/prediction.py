"""Predicted against live tokens per second: how far table and costs explain the clock."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftpool.analysis.tidy import main_stream, read_meta, read_tidy
from draftpool.figures import style

# Issue of the replay laboratory: predictions should lie this close.
TOLERANCE = 0.1


def draw(stats: Path, out: Path) -> None:
    """Draw one point per selector; reads prediction and meta."""
    meta, rows = read_meta(stats), read_tidy(stats, "prediction")
    stream = main_stream(rows)
    rows = rows[rows["stream"] == stream]
    figure, axes = style.panels(1, 1, 3.6)
    panel = axes[0, 0]
    kinds = np.array([style.family(name) for name in rows["selector"]])
    ends = np.array(
        [rows[["live", "predicted"]].min().min() * 0.95, rows[["live", "predicted"]].max().max() * 1.05]
    )
    panel.plot(ends, ends, color="black", lw=0.8, label="equal")
    panel.fill_between(ends, ends * (1 - TOLERANCE), ends * (1 + TOLERANCE), color="0.9", label="within 10 %")
    for kind in style.FAMILIES:
        own = rows[kinds == kind]
        if len(own):
            panel.scatter(
                own["live"], own["predicted"], s=18, color=style.FAMILIES[kind], label=kind, zorder=3
            )
    panel.set_xlabel(f"live decoding (tokens/s, {meta['timed_dtype']})")
    panel.set_ylabel("acceptance table and costs (tokens/s)")
    close = (np.abs(rows["predicted"] / rows["live"] - 1) <= TOLERANCE).sum()
    message = f"{stream.capitalize()} stream: {close} of {len(rows)} predictions within 10 % of live decoding"
    note = f"Ratio of totals over {style.counts_text(rows['n'])} prompts per selector."
    style.frame(figure, message, note, panel, columns=3)
    style.save(figure, out)
