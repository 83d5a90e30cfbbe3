"""Routes of prompts as routers chose them: which arm each prompt or session goes to."""

from __future__ import annotations

from pathlib import Path

import pandas as pd


def load_routes(folder: Path, homes: dict[str, str], arms: tuple[str, ...], generalist: str) -> pd.DataFrame:
    """Arm of every routed prompt: index prompt_id, one column per kind of features.

    Args:
        folder: Written by :func:`train_router`.
        homes: Domain of every specialist.
        arms: The pool.
        generalist: Takes prompts of domains without a specialist in the pool.
    """
    arm_of = {domain: arms.index(name) for name, domain in homes.items() if name in arms}
    fallback = arms.index(generalist) if generalist in arms else 0
    routes = pd.read_csv(folder / "routes.csv")
    routes["arm"] = routes["route"].map(arm_of).fillna(fallback).astype(int)
    return routes.pivot(index="prompt_id", columns="features", values="arm")
