"""Statistics of training logs: dynamics per slot, clipped share, and what a D-PACE step costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.bootstrap import Interval, Resampling, median_ratio_interval
from draftpool.errors import DraftpoolError

WARM_UP_STEPS = 5
SHAPE = ["block_size", "n_layers", "steps", "seed", "role"]


def read_logs(folders: dict[str, Path]) -> dict[str, pd.DataFrame]:
    """Read ``training.csv`` of every drafter run.

    Raises:
        DraftpoolError: If one is missing or empty.
    """
    logs = {}
    for name, folder in folders.items():
        file = Path(folder) / "training.csv"
        try:
            logs[name] = pd.read_csv(file)
        except (OSError, pd.errors.EmptyDataError) as error:
            raise DraftpoolError("training log missing or empty", str(file), f"train {name} again") from error
    return logs


def training_summary(logs: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Summarise each run.

    Returns:
        Columns drafter, steps, final_loss (mean of the last tenth), clipped_share, grad_norm_median,
        step_time_median (s), tokens_per_s_median.
    """
    rows = []
    for name, log in logs.items():
        rows.append(
            {
                "drafter": name,
                "steps": len(log),
                "final_loss": log["loss"].tail(max(1, len(log) // 10)).mean(),
                "clipped_share": log["clipped"].mean(),
                "grad_norm_median": log["grad_norm"].median(),
                "step_time_median": log["step_time"].iloc[_first(log) :].median(),
                "tokens_per_s_median": log["tokens_per_s"].iloc[_first(log) :].median(),
            }
        )
    return pd.DataFrame(rows)


def training_dynamics(logs: dict[str, pd.DataFrame], bins: int = 60) -> pd.DataFrame:
    """Confidence and weight share per slot over training, averaged in at most ``bins`` equal spans of steps.

    Returns:
        Columns drafter, step (mean of the span), slot, confidence, weight_share.
    """
    frames = []
    for name, log in logs.items():
        span = np.arange(len(log)) * min(bins, len(log)) // len(log)
        means = log.groupby(span).mean(numeric_only=True)
        slots = sorted(
            int(column.removeprefix("confidence_")) for column in log if column.startswith("confidence_")
        )
        for slot in slots:
            columns = {
                "confidence": means[f"confidence_{slot}"],
                "weight_share": means[f"weight_share_{slot}"],
            }
            frames.append(pd.DataFrame({"drafter": name, "step": means["step"], "slot": slot, **columns}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def dpace_overhead(
    logs: dict[str, pd.DataFrame], drafters: pd.DataFrame, resampling: Resampling
) -> Interval | None:
    """Extra time of a D-PACE step: median step time over that of DFlash, minus 1; None without a pair.

    Comparable runs have the same block, layers, budget, training seed and role; n counts steps of both. Steps
    are treated as independent, so the interval does not cover the drift of a machine between two runs.
    """
    groups = drafters[drafters["drafter"].isin(list(logs))].groupby(SHAPE, observed=True)
    times: dict[str, list[pd.Series]] = {"dpace": [], "dflash": []}
    for _, group in groups:
        chosen = {kind: group[group["objective"] == kind]["drafter"] for kind in times}
        if all(len(names) for names in chosen.values()):
            for kind, names in chosen.items():
                times[kind] += [logs[name]["step_time"].iloc[_first(logs[name]) :] for name in names]
    if not times["dpace"]:
        return None
    return median_ratio_interval(pd.concat(times["dpace"]), pd.concat(times["dflash"]), resampling)


def _first(log: pd.DataFrame) -> int:
    return min(WARM_UP_STEPS, len(log) - 1)
