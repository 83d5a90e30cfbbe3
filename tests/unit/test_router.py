"""Stage train_router on a tiny world: routes of held-out prompts, by words and by hidden states."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file
from tiny import TAPS

from draftpool.artefacts import read_table
from draftpool.errors import DraftpoolError
from draftpool.replay.router import classifier, mean_hidden, prompt_texts, train_router
from draftpool.replay.routes import load_routes


def test_routes_of_every_held_out_prompt(llama_world, tmp_path):
    world = llama_world
    cfg = {"domains": ["tales", "sums"], "routed": ["tales", "sums"], "taps": TAPS}
    train_router(cfg, world.prompts, world.train, world.prompts, world.heldout, tmp_path / "routes")
    routes = pd.read_csv(tmp_path / "routes" / "routes.csv")
    tables = [read_table(folder / "responses.parquet") for folder in world.heldout]
    answered = set(pd.concat(tables).prompt_id)
    for _, own in routes.groupby("features"):
        assert set(own.prompt_id) == answered and set(own.route) <= {"tales", "sums"}
        assert own.probability.between(0.5, 1.0).all()
    accuracy = json.loads((tmp_path / "routes" / "accuracy.json").read_text())
    for features, own in routes.groupby("features"):
        for domain, rows in own.groupby("domain"):
            right = int((rows.route == domain).sum())
            assert accuracy[features][domain] == {"right": right, "n": len(rows)}
    table = load_routes(tmp_path / "routes", {"b": "tales"}, ("a", "b"), "a")
    expected = routes.assign(arm=(routes.route == "tales").astype(int))
    for row in expected.itertuples():
        assert table.loc[row.prompt_id, row.features] == row.arm


def test_hidden_features_are_means_over_the_prompt(llama_world):
    folder = llama_world.train[0]
    (path,) = folder.glob("taps-*")
    taps = load_file(path)["taps"].float().numpy()
    row = read_table(folder / "responses.parquet").iloc[1]
    width = taps.shape[1] // len(TAPS)
    rows = taps[row.prompt_offset : row.prompt_offset + len(row.prompt_ids), -width:]
    np.testing.assert_allclose(mean_hidden(folder, len(TAPS))[row.prompt_id], rows.mean(axis=0), rtol=1e-5)


def test_words_tell_domains_apart(llama_world):
    texts = prompt_texts(llama_world.prompts[0], "train")
    assert all(texts.values())
    model = classifier("tfidf").fit(
        ["add two numbers", "sum of numbers", "a fox", "the dog"], ["m", "m", "t", "t"]
    )
    assert list(model.predict(["numbers", "dog"])) == ["m", "t"]


def test_one_domain_is_refused(llama_world, tmp_path):
    with pytest.raises(DraftpoolError, match="one domain needs no router"):
        train_router({"domains": ["tales"], "routed": [], "taps": TAPS}, [], [], [], [], tmp_path / "r")
    assert not (tmp_path / "r").exists()
