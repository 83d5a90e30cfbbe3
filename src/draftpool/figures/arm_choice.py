"""Which arm each selector played, by domain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns

from draftpool.analysis.tidy import main_stream, read_drafters, read_meta, read_tidy
from draftpool.figures import style

PER_ROW = 3


def draw(stats: Path, out: Path) -> None:
    """Draw one heat map (domain x arm) per selector; reads arm_shares, drafters and meta.

    Raises:
        DraftpoolError: If there was no live decoding.
    """
    meta, drafters, shares = read_meta(stats), read_drafters(stats), read_tidy(stats, "arm_shares")
    stream = main_stream(shares)
    shares = shares[
        (shares["dtype"] == meta["exact_dtype"]) & (shares["stream"] == stream) & (shares["domain"] != "all")
    ]
    homes = drafters.set_index("drafter")["home"].dropna().to_dict()
    arms = [name for name in (*meta["pool"], "plain") if name in set(shares["arm"])]
    domains = [name for name in meta["domains"] if name in set(shares["domain"])]
    selectors = sorted(shares["selector"].unique(), key=lambda name: -_home_share(shares, name, homes))
    columns = min(PER_ROW, len(selectors))
    rows = -(-len(selectors) // columns)
    longest = max(len(_arm_label(name)) for name in arms)
    height = rows * (0.35 + 0.23 * len(domains)) + 0.075 * longest + 0.8
    figure, axes = style.panels(rows, columns, height, sharex=True, sharey=True)
    for panel, selector in zip(axes.flat, selectors, strict=False):
        grid = shares[shares["selector"] == selector].pivot(index="domain", columns="arm", values="value")
        grid = grid.reindex(index=domains, columns=arms).fillna(0.0) * 100
        sns.heatmap(
            grid,
            ax=panel,
            annot=True,
            fmt=".0f",
            annot_kws={"fontsize": 6.5},
            cmap=style.SEQUENTIAL,
            vmin=0,
            vmax=100,
            cbar=False,
            lw=0.5,
        )
        style.readable_cells(panel)
        for column, arm in enumerate(arms):
            if homes.get(arm) in domains:
                style.outline(panel, column, domains.index(homes[arm]))
        panel.set_title(style.selector_label(selector, meta["generalist"]), fontsize=8)
        panel.set(xlabel="", ylabel="")
        panel.tick_params(length=0)
        panel.set_yticks(np.arange(len(domains)) + 0.5, domains, rotation=0)
        panel.set_xticks(np.arange(len(arms)) + 0.5, [_arm_label(name) for name in arms], rotation=90)
    for panel in axes.flat[len(selectors) :]:
        panel.set_visible(False)
    learners = [name for name in selectors if style.family(name) == "learner"]
    named = [*learners[:1], *(["random"] if "random" in selectors else [])]
    parts = [
        f"{style.selector_label(name)} {style.percent(_home_share(shares, name, homes))}" for name in named
    ]
    message = (
        "Rounds drafted by the domain's own specialist: " + ", ".join(parts)
        if homes and parts
        else "Arm shares by domain"
    )
    note = (
        f"Cells: % of rounds, {stream} stream; {style.counts_text(shares['n'])} prompts per domain; "
        f"{style.percent(meta['confidence'])} intervals: {style.half_width(shares, 100, 1)}. "
        f"{'Outlined: a specialist at home.' if homes else ''}"
    )
    style.frame(figure, message, note)
    style.save(figure, out)


def _arm_label(name: str) -> str:
    return style.run_label(name.removeprefix("specialist_"))


def _home_share(shares: pd.DataFrame, selector: str, homes: dict[str, str]) -> float:
    rows = shares[shares["selector"] == selector]
    at_home = rows["arm"].map(homes) == rows["domain"]
    return float(rows.loc[at_home, "value"].mean()) if at_home.any() else 0.0
