"""Summary of every drafter run: what it is, how training went, how well it drafts."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.analysis.tidy import read_drafters, read_meta, read_tidy
from draftpool.tables.common import note
from draftpool.tables.writer import interval_text, write_all


def write(stats: Path, out: Path) -> None:
    """Write one row per drafter run; reads drafters, tau, training (if any) and meta."""
    meta, drafters, taus = read_meta(stats), read_drafters(stats), read_tidy(stats, "tau")
    taus = taus[(taus["level"] == "run") & (taus["metric"] == "tau")].set_index(["drafter", "scope"])
    logs = (
        read_tidy(stats, "training").set_index("drafter")
        if (Path(stats) / "training.csv").is_file()
        else None
    )
    rows = []
    for run in drafters.itertuples():
        row = {
            "drafter": run.drafter,
            "kind": run.kind,
            "role": run.role,
            "objective": None if pd.isna(run.objective) else run.objective,
            "alpha": None if pd.isna(run.alpha) else f"{run.alpha:g}",
            "reduction": None if pd.isna(run.reduction) else run.reduction,
            "block": _count(run.block_size),
            "layers": _count(run.n_layers),
            "steps": _count(run.steps),
        }
        if logs is not None:
            row |= dict.fromkeys(("final loss", "clipped steps", "s/step"))
        if logs is not None and run.drafter in logs.index:
            log = logs.loc[run.drafter]
            row |= {
                "final loss": f"{log['final_loss']:.3f}",
                "clipped steps": f"{log['clipped_share'] * 100:.0f} %",
                "s/step": f"{log['step_time_median']:.3f}",
            }
        at_home = isinstance(run.home, str)
        row["tau at home"] = interval_text(taus.loc[(run.drafter, run.home)]) if at_home else None
        row["mean tau"] = interval_text(taus.loc[(run.drafter, "mean")])
        row["full blocks"] = f"{run.censored_share * 100:.1f} %"
        rows.append(row)
    n = int(taus.xs("mean", level="scope")["n"].max())
    text = (
        f"tau: tokens per target call; mean over domains, n = {n} prompts. Final loss: each under its own "
        "objective, so not comparable between objectives. Full blocks: share of anchors where every slot "
        "matched, or the answer ended inside the match: a longer block might have committed more."
    )
    write_all(pd.DataFrame(rows), out, note(meta, text))


def _count(value: object) -> str | None:
    # As text: numbers beside missing ones would become 400.0.
    return None if pd.isna(value) else str(int(value))
