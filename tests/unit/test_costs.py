"""Stage profile_costs on a tiny model: every part of a round has a price, and rounds can be priced with it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import TAPS, load, named

from draftpool.decoding import costs
from draftpool.decoding.cost_model import load_costs
from draftpool.decoding.costs import profile_costs
from draftpool.drafters.block_live import load_model
from draftpool.errors import DraftpoolError


def cfg_of(world, **changes) -> dict:
    cfg = {"drafters": named(world), "repeats": 5, "dtype": "float32", "taps": TAPS}
    return cfg | {"backend": "fast", "device": "cpu"} | changes


def test_every_part_has_a_price(llama_world, tmp_path):
    world = llama_world
    profile_costs(cfg_of(world), world.target, world.heldout, world.drafters, tmp_path / "costs")
    made = json.loads((tmp_path / "costs" / "costs.json").read_text())
    # Blocks of 8 and 4 tokens, and plain decoding.
    assert set(made["verify"]) == {"1", "4", "8"} and set(made["draft"]) == set(world.names)
    assert all(
        seconds > 0 for seconds in [*made["verify"].values(), *made["draft"].values(), made["evaluate"]]
    )
    assert set(made["select"]) == {"bandit", "full"}
    for folder in world.drafters:
        drafter = load_model(folder, load(world.target, TAPS))
        own = sum(4 * tensor.numel() for tensor in (*drafter.parameters(), drafter.head))
        config = drafter.config
        state = 2 * 4 * config.n_layers * config.kv_heads * config.head_dim
        assert made["memory"][folder.name] == {"weights": own, "state": state}
    # Drafters of different shape are evaluated one by one; together they cost more than the dearest alone.
    assert made["evaluate_catch_up"] is None and made["evaluate"] > max(made["draft"].values())
    assert all(low <= high for low, high in made["spread"].values())
    arms = (*world.names, "plain")
    k = np.array([7, 3, 3, 0])
    model = load_costs(tmp_path / "costs", arms, k)
    assert model.draft[-1] == 0.0 and model.rounds[-1] == pytest.approx(made["verify"]["1"])
    assert (model.rounds[:-1] > model.draft[:-1] + model.verify[:-1] - 1e-12).all()


def test_drafters_of_one_shape_are_evaluated_together(qwen3_world, tmp_path):
    world = qwen3_world
    # `short` and a second copy of it have one shape.
    folders = [world.drafters[2], world.drafters[2]]
    drafters = [{"name": name, "kind": "block", "id": name} for name in ("one", "two")]
    profile_costs(cfg_of(world, drafters=drafters), world.target, world.heldout, folders, tmp_path / "costs")
    made = json.loads((tmp_path / "costs" / "costs.json").read_text())
    assert made["evaluate_catch_up"]["fixed"] >= 0.0
    assert load_costs(tmp_path / "costs", ("one", "two"), np.array([3, 3])).evaluate == made["evaluate"]


def test_answers_shorter_than_a_block_are_told(llama_world, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "read_table", lambda path: costs_table())
    with pytest.raises(DraftpoolError, match="no held-out answer has 8 tokens"):
        profile_costs(
            cfg_of(llama_world), llama_world.target, llama_world.heldout, llama_world.drafters, tmp_path / "c"
        )
    assert not (tmp_path / "c").exists()


def costs_table():
    """An answer of two tokens."""
    import pandas as pd

    return pd.DataFrame({"prompt_ids": [list(range(20))], "response_ids": [[1, 2]]})
