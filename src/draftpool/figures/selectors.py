"""Selectors on one stream: speed-up over plain decoding and MAT, ordered, with intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.tidy import main_stream, read_meta, read_tidy
from draftpool.figures import style


def draw(stats: Path, out: Path) -> None:
    """Draw speed-up (left) and MAT (right) of every selector; reads selectors and meta.

    Raises:
        DraftpoolError: If there was no live decoding.
    """
    meta, rows = read_meta(stats), read_tidy(stats, "selectors")
    stream = main_stream(rows)
    rows = rows[(rows["stream"] == stream) & (rows["scope"] == "all")]
    speed = rows[(rows["metric"] == "speedup") & (rows["dtype"] == meta["timed_dtype"])]
    mat = rows[(rows["metric"] == "mat") & (rows["dtype"] == meta["exact_dtype"])].set_index("selector")
    # Plain decoding is the line at 1, not a point beside it.
    speed = speed[speed["selector"] != "plain"].sort_values("value").set_index("selector")
    mat = mat.reindex(speed.index)
    at = np.arange(len(speed))
    figure, axes = style.panels(1, 2, 1.5 + 0.2 * len(speed), sharey=True)
    for panel, values in zip(axes[0], (speed, mat), strict=True):
        kinds = np.array([style.family(name) for name in values.index])
        for kind in style.FAMILIES:
            if (kinds == kind).any():
                marker = {"fixed drafter": "o", "learner": "s", "oracle": "D"}.get(kind, "^")
                style.draw_points(
                    panel,
                    at[kinds == kind],
                    values[kinds == kind],
                    style.FAMILIES[kind],
                    marker,
                    True,
                    label=kind,
                )
        panel.axvline(1, color="black", lw=0.8, ls="--")
        panel.grid(axis="y", lw=0.4)
        panel.set_ylim(-0.7, len(speed) - 0.3)
    axes[0, 0].set_yticks(at, [style.selector_label(name, meta["generalist"]) for name in speed.index])
    axes[0, 0].set_xlabel(f"speed-up over plain decoding ({meta['timed_dtype']})")
    axes[0, 1].set_xlabel(f"MAT (tokens per target call, {meta['exact_dtype']})")
    note = (
        f"Dashed: plain decoding = 1. Bars: {style.percent(meta['confidence'])} bootstrap intervals over "
        f"{style.counts_text(speed['n'])} prompts. Speed-up = ratio of total decode time per token."
    )
    style.frame(figure, _message(speed, stream), note, axes[0, 0], columns=5)
    style.save(figure, out)


def _message(speed: pd.DataFrame, stream: str) -> str:
    kinds = pd.Series([style.family(name) for name in speed.index], index=speed.index)
    parts = []
    for kind, words in (("learner", "best learner"), ("fixed drafter", "best fixed")):
        if (kinds == kind).any():
            best = speed[kinds == kind].iloc[-1]
            parts.append(f"{words} {style.selector_label(best.name)} {best['value']:.2f}x")
    return f"{stream.capitalize()} stream: " + ", ".join(parts)
