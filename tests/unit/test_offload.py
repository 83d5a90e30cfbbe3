"""Weights that wait in main memory: one drafter at a time is admitted, and texts and drafts are the same."""

from __future__ import annotations

import time

import pytest
import torch
from drafter_kinds import MODELLED, make
from scripted import run
from tiny import TAPS, load, token_ids

from draftpool.drafters import offload
from draftpool.drafters.offload import OffloadedDrafter, Residence, offloaded

CPU = torch.device("cpu")
WITH_WEIGHTS = ("block", "eagle", "independent")


@pytest.fixture
def target(targets):
    return load(targets.llama, TAPS)


def test_only_the_active_drafter_is_on_the_accelerator(target, monkeypatch) -> None:
    arms = {kind: make(kind, target) for kind in (*WITH_WEIGHTS, "ngram", "early_exit")}
    prompt = token_ids(8)
    plain = run(target, prompt, dict(arms), {"kind": "round_robin"}, limit=24, hard=True)
    resident, most = set(), []
    for name, drafter in arms.items():
        if name not in WITH_WEIGHTS:
            continue
        move = drafter.move

        def moved(device, name=name, move=move):
            move(CPU)
            (resident.discard if device == offload.HOME else resident.add)(name)
            most.append(len(resident))

        monkeypatch.setattr(drafter, "move", moved)
    # A second CPU stands for the accelerator.
    waiting = offloaded(arms, torch.device("cpu", 0))
    assert {name for name, arm in waiting.items() if isinstance(arm, OffloadedDrafter)} == set(WITH_WEIGHTS)
    made = run(target, prompt, waiting, {"kind": "round_robin"}, limit=24, hard=True)
    assert made.tokens == plain.tokens and max(most) == 1 and len(resident) == 1
    assert [row["arm"] for row in made.rounds] == [row["arm"] for row in plain.rounds]
    assert [row["n_accepted"] for row in made.rounds] == [row["n_accepted"] for row in plain.rounds]
    # Full information evaluates every drafter, one after the other.
    assert run(target, prompt, waiting, {"kind": "hedgespec"}, limit=24, hard=True).tokens == plain.tokens
    assert max(most) == 1


@pytest.mark.parametrize("kind", [kind for kind in MODELLED if kind in WITH_WEIGHTS])
def test_weights_come_back_as_they_were(kind, target) -> None:
    """A move in half precision, where nothing is packed, to another dtype-free place and back."""
    drafter = make(kind, target)
    ids = torch.tensor(token_ids(9))
    taps = target.forward(ids[None], target.new_cache(9), "none").taps[0]
    drafter.reset(16)
    drafter.prefill(ids, taps)
    before = drafter.draft(7)
    for _ in range(2):
        drafter.move(CPU)
    after = drafter.draft(7)
    assert before.ids.tolist() == after.ids.tolist() and torch.equal(before.log_q, after.log_q)


def test_moving_is_counted_and_charged_to_the_switch(target, monkeypatch) -> None:
    residence = Residence(torch.device("cpu", 0))
    inner = make("block", target)
    arm = OffloadedDrafter(inner, residence)

    def slow(device):
        time.sleep(0.005)

    monkeypatch.setattr(inner, "move", slow)
    other = make("ngram", target)
    result = run(
        target, token_ids(8), {"other": other, "arm": arm}, {"kind": "round_robin"}, limit=12, hard=True
    )
    first = next(row for row in result.rounds if row["arm"] == "arm")
    assert first["t_switch"] >= 0.005
    # It is alone with weights, so it moved once.
    assert residence.moved == sum(t.numel() * t.element_size() for t in inner.weights())
