"""Reading what ``compute_stats`` wrote: tidy CSVs and the study's description."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from draftpool.artefacts import read_json
from draftpool.data.streams import HELD_OUT, MAIN
from draftpool.errors import DraftpoolError


def read_tidy(stats: Path, name: str) -> pd.DataFrame:
    """Read ``<name>.csv`` of a statistics folder.

    Raises:
        DraftpoolError: If the study has no such data.
    """
    file = Path(stats) / f"{name}.csv"
    if not file.is_file():
        raise DraftpoolError(
            f"this study has no {name} statistics", str(file), "do not ask for this figure or table here"
        )
    return pd.read_csv(file)


def read_meta(stats: Path) -> dict:
    """Read the study's name, domains, pool, generalist, confidence, exact_dtype and timed_dtype."""
    return read_json(Path(stats) / "meta.json")


def read_drafters(stats: Path) -> pd.DataFrame:
    """Read the table of drafters; counts are whole numbers, missing where there was no training."""
    return read_tidy(stats, "drafters").astype({"block_size": "Int64", "n_layers": "Int64", "steps": "Int64"})


def stream_of_pool(pool: str) -> str:
    """Name under which a pool's replay of all held-out answers stands in the tables."""
    return HELD_OUT if pool == MAIN else f"{HELD_OUT}@{pool}"


def of_main_pool(frame: pd.DataFrame, meta: dict) -> pd.DataFrame:
    """Rows of streams that the main pool plays; those of further pools have another generalist."""
    others = {name for name, pool in meta["stream_pools"].items() if pool != MAIN}
    return frame[~frame["stream"].str.contains("@") & ~frame["stream"].isin(others)]


def main_stream(frame: pd.DataFrame) -> str:
    """Stream that headline figures show: ``mixed`` where there is one, else the first by name."""
    streams = sorted(name for name in frame["stream"].unique() if "@" not in name)
    return "mixed" if "mixed" in streams else streams[0]


def recipe_rows(drafters: pd.DataFrame) -> pd.DataFrame:
    """One row per recipe (the first seed's), with the number of seeds in ``seeds``, in the study's order."""
    seeds = drafters.groupby("recipe", sort=False)["drafter"].size().rename("seeds")
    return drafters.drop_duplicates("recipe").merge(seeds.reset_index(), on="recipe")
