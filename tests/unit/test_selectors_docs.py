"""The walkthroughs' examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from scripted import run
from selector_worlds import play, random_world
from tiny import load, token_ids

DOCS = Path(__file__).parents[2] / "docs"


def example(page: str) -> dict:
    """Names defined by the first Python block of a page."""
    code = re.search(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL).group(1)
    names: dict = {"__name__": page}
    exec(compile(code, page, "exec"), names)
    return names


def test_selector_of_the_walkthrough_plays():
    cls = example("add-a-selector.md")["EpsilonGreedy"]
    world = random_world(0, rounds=40, episodes=30, arms=3)
    arms, propensity = play(cls(["a", "b", "c"], epsilon=0.3), world)
    alone, _ = play(cls(["a", "b", "c"], epsilon=0.3), world.episode(4))
    assert alone[:, 0].tolist() == arms[:, 4].tolist()
    assert ((propensity > 0) | ~world.active).all()


def test_objective_of_the_walkthrough_computes():
    objective = example("add-an-objective.md")["Ramp"](block_size=6, last=0.2)
    log_q = torch.full((1, 5), -1.0)
    report = objective.loss(log_q, log_q < 0, torch.tensor([0]), 1)
    assert report.loss.item() == pytest.approx(1 + 0.8 + 0.6 + 0.4 + 0.2)


def test_drafter_of_the_walkthrough_drafts_and_leaves_the_text_alone(targets):
    target, prompt = load(targets.llama, [0, 1]), token_ids(8)
    drafter = example("add-a-drafter.md")["EchoDrafter"]("echo", 2)
    plain = run(target, prompt, {"plain": None}, limit=20)
    made = run(target, prompt, {"echo": drafter, "plain": None}, {"kind": "round_robin"}, limit=20, hard=True)
    assert made.tokens == plain.tokens and any(row["n_drafted"] == 2 for row in made.rounds)
