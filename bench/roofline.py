"""Figure of bench_decode: what every call reads and how long it takes, against the bandwidth of the machine.

python bench/roofline.py results/bench/decode.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from draftpool.figures import style


def draw(path: Path) -> Path:
    """Draw `<path's folder>/roofline.png` (and PDF) of a `decode.json`; returns the PNG's path."""
    result = json.loads(path.read_text())
    rows, size = result["rows"], result["bytes"]
    bandwidth = rows["read bandwidth"]["median"]
    figure, axes = style.panels(1, 1, 4.0)
    panel = axes[0, 0]
    kinds = {
        "block": ("target", 0),
        "draft": ("drafter", 1),
        "stack": ("stacked pool", 2),
        "trans": ("transformers", 3),
    }
    seen = set()
    for name, moved in size.items():
        label, number = next(kind for start, kind in kinds.items() if name.startswith(start))
        row = rows[name]
        point = {key: row[key] for key in ("low", "median", "high")}
        panel.errorbar(
            moved / 1e6,
            point["median"],
            yerr=[[point["median"] - point["low"]], [point["high"] - point["median"]]],
            fmt=style.MARKERS[number],
            color=style.COLOURS[number],
            label=None if label in seen else label,
        )
        seen.add(label)
        text, left = name.removeprefix("transformers, "), False
        if name.startswith("block of "):
            # Blocks stand above each other; the ends of the column tell the rest.
            text, left = name.removeprefix("block of "), True
            if text not in ("1", "16"):
                continue
        panel.annotate(
            text,
            (moved / 1e6, point["median"]),
            textcoords="offset points",
            xytext=(-8 if left else 8, -3),
            ha="right" if left else "left",
            fontsize=7,
        )
    line = np.geomspace(min(size.values()) / 2e6, max(size.values()) * 2 / 1e6, 50)
    panel.plot(line, line / bandwidth, color="black", lw=1, label=f"reading at {bandwidth:.0f} GB/s")
    panel.plot(line, line / bandwidth / 0.4, color=style.GREY, lw=1, ls="--", label="40 % of it")
    panel.set(xscale="log", yscale="log", xlabel="weights read per call (MB)", ylabel="time per call (ms)")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    panel.grid(lw=0.4)
    share = rows["share of the bandwidth limit, one token (bar: at least 0.4)"]["median"]
    note = (
        f"{result['dtype']}, {result['threads']} threads, {result['device']}. Target: blocks of 1 to 16 tokens. "
        "Bars: quartiles. Bandwidth: sum over 1 GB with the same threads."
    )
    style.frame(
        figure, f"One plain token uses {style.percent(share)} of the memory bandwidth", note, panel, columns=6
    )
    out = path.parent / "roofline.png"
    style.save(figure, out)
    return out


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
