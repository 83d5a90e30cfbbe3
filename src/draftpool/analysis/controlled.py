"""Whether a comparison of two recipes was a controlled one: same start, same data order, only the objective differs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import yaml

from draftpool.artefacts import read_json


def controlled(cfg: dict, training: dict[str, Path]) -> pd.DataFrame:
    """Check every pair of `compare`, seed by seed, from what the training jobs wrote down.

    Args:
        cfg: Configuration of compute_stats (`drafters`, `compare`).
        training: Drafter folder of every run.

    Returns:
        Columns a, b, seed, same_start (hash of the initial weights), same_order (hash of sequences and anchors),
        differs (keys of the configuration that differ), controlled (both hashes equal, only `objective` differs).
    """
    runs = {(drafter["recipe"], drafter["seed"]): drafter["name"] for drafter in cfg["drafters"]}
    rows = []
    for pair in cfg["compare"]:
        seeds = sorted({seed for recipe, seed in runs if recipe == pair["a"]})
        for seed in seeds:
            names = [runs.get((pair[side], seed)) for side in ("a", "b")]
            if any(name is None or name not in training for name in names):
                continue
            folders = [training[name] for name in names]
            made = [read_json(folder / "provenance.json") for folder in folders]
            resolved = [yaml.safe_load((folder / "resolved.yaml").read_text()) for folder in folders]
            differs = sorted(key for key in resolved[0] if resolved[0][key] != resolved[1].get(key))
            same_start = made[0]["initial_parameters"] == made[1]["initial_parameters"]
            same_order = made[0]["data_order"] == made[1]["data_order"]
            rows.append(
                {
                    "a": pair["a"],
                    "b": pair["b"],
                    "seed": seed,
                    "same_start": same_start,
                    "same_order": same_order,
                    "differs": " ".join(differs),
                    "controlled": same_start and same_order and differs == ["objective"],
                }
            )
    return pd.DataFrame(rows)
