"""Trainings of every kind on a tiny world, and how close two of them are."""

from __future__ import annotations

import pandas as pd
import torch
from safetensors.torch import load_file
from tiny import training_cfg

from draftpool.artefacts import read_json
from draftpool.training.train import train_drafter

TIMING = ["step_time", "tokens_per_s"]
STEPS = 5
MODELS = {
    "block": {"n_layers": 2, "block_size": 4, "draft_vocab": 60},
    "eagle": {"draft_tokens": 3, "draft_vocab": 60, "own_head": False},
    "independent": {"n_layers": 2, "layers": None, "draft_tokens": 3, "draft_vocab": None},
}


def cfg_of(kind: str = "block", objective: dict | None = None, steps: int = STEPS, **training) -> dict:
    """A training in float32: what agrees up to rounding shows it there."""
    objective = objective or {"kind": "dpace", "alpha": 0.5, "reduction": "anchor_mean"}
    cfg = training_cfg(steps, objective, model=MODELS[kind], domains=["tales", "sums"])
    cfg["training"] |= {"lr": 3e-4, "precision": "float32", "batch_sequences": 5} | training
    return cfg | {"kind": kind, "init": "target_layers"}


def alone(world, root, cfg: dict, accumulate: int = 1, name: str = "alone"):
    """The same training in this process."""
    train_drafter(cfg, world.target, world.train, None, root / "state" / name, root / name, accumulate)
    return root / name


def log_of(folder) -> pd.DataFrame:
    return pd.read_csv(folder / "training.csv").drop(columns=TIMING)


def assert_close(one, two) -> None:
    """Weights and logs agree within 1e-5 (losses relative to their size)."""
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=0.0, atol=1e-5)
    pd.testing.assert_frame_equal(log_of(one), log_of(two), check_exact=False, rtol=1e-5, atol=1e-6)
    first, second = (read_json(folder / "provenance.json") for folder in (one, two))
    for name in ("initial_parameters", "data_order", "sequences", "vocabulary_coverage"):
        assert first[name] == second[name]


def assert_equal(one, two) -> None:
    """Weights and logs are the same bit by bit."""
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert weights.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    pd.testing.assert_frame_equal(log_of(one), log_of(two), check_exact=True)
