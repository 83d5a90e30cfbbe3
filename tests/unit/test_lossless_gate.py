"""check_lossless as a stage: what the gate reports, and what it stops."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TAPS

from draftpool.artefacts import read_json
from draftpool.decoding import engine, lossless
from draftpool.decoding.lossless import check_lossless, first_difference
from draftpool.errors import DraftpoolError


def _named(world) -> list[dict]:
    return [{"name": name, "kind": "block", "id": name} for name in world.names]


def _lossless_cfg(world, **changes) -> dict:
    cfg = {"prompts_per_domain": 2, "max_new_tokens": 24, "max_prompt_tokens": 20, "bfloat16_prompts": 3}
    return (
        cfg
        | {"drafters": _named(world), "taps": TAPS, "backend": "fast", "device": "cpu", "seed": 0}
        | changes
    )


@pytest.mark.parametrize("world", ["llama_world", "qwen3_world"])
def test_d01_d02_d07_the_gate_reports_what_the_contract_says(world, request, tmp_path) -> None:
    world = request.getfixturevalue(world)
    check_lossless(
        _lossless_cfg(world), world.target, world.prompts, world.drafters, tmp_path / "lossless.json"
    )
    report = read_json(tmp_path / "lossless.json")
    exact, half = report["float32"], report["bfloat16"]
    assert set(report) == {"float32", "bfloat16"}
    assert set(exact) == {"prompts", "tokens", "drafted", "accepted", "rejected", "mismatches", "rounds"}
    assert set(exact["rounds"]) == set(world.names) and min(exact["rounds"].values()) >= 2
    assert exact["prompts"] == 4 and exact["mismatches"] == 0
    assert (
        exact["drafted"] == exact["accepted"] + exact["rejected"]
        and min(exact["accepted"], exact["rejected"]) > 0
    )
    numbers = {"positions", "flips", "rate", "logit_diff_p99", "margin_bound", "max_flip_margin"}
    assert set(half) == numbers | {"flip_margins", "median_top2_margin"}
    assert half["flips"] == len(half["flip_margins"]) and half["rate"] == half["flips"] / half["positions"]
    assert half["margin_bound"] == pytest.approx(4 * half["logit_diff_p99"]) and half["logit_diff_p99"] > 0
    assert half["max_flip_margin"] == max(half["flip_margins"], default=0.0) <= half["margin_bound"]
    assert 0 < half["positions"] <= exact["tokens"]


def test_every_drafter_of_a_large_pool_has_its_turns():
    for drafters, prompts in ((3, 4), (29, 24), (11, 6), (5, 1), (6, 7)):
        names = [str(number) for number in range(drafters)]
        groups = lossless.gate_groups(names, prompts)
        assert len(groups) == prompts and all(len(set(group)) == min(5, drafters) for group in groups)
        counts = Counter(name for group in groups for name in group)
        assert max(counts.values()) - min(counts.get(name, 0) for name in names) <= 1


def test_a_drafter_without_a_second_turn_ends_the_gate(llama_world, tmp_path) -> None:
    with pytest.raises(DraftpoolError, match="had no second turn.*raise lossless.prompts_per_domain"):
        _gate(llama_world, tmp_path, prompts_per_domain=1, max_new_tokens=4)


def _gate(world, folder: Path, **changes) -> None:
    check_lossless(
        _lossless_cfg(world, **changes), world.target, world.prompts, world.drafters, folder / "lossless.json"
    )


def test_d02_a_flip_beyond_rounding_stops_the_study(llama_world, tmp_path, monkeypatch) -> None:
    widths = lossless._widths

    def wrong(target, prompt, answer, width):
        logits = widths(target, prompt, answer, width)
        if target.dtype == torch.bfloat16 and width == 1:
            logits[0, int(logits[0].argmin())] = logits[0].max() + 100.0
        return logits

    monkeypatch.setattr(lossless, "_widths", wrong)
    with pytest.raises(DraftpoolError, match="bfloat16 changed a token whose margin is 100"):
        _gate(llama_world, tmp_path, bfloat16_prompts=1)
    assert not list(tmp_path.iterdir())


def test_the_gate_can_leave_bfloat16_out(llama_world, tmp_path) -> None:
    _gate(llama_world, tmp_path, bfloat16_prompts=0)
    assert read_json(tmp_path / "lossless.json")["bfloat16"] is None


def test_d09_the_gate_fails_on_another_text(llama_world, tmp_path, monkeypatch) -> None:
    def sabotaged(draft, choices, limit, ends):
        return engine_match([*draft], [*draft, choices[-1]] if draft else choices, limit, ends)

    engine_match = engine.match
    monkeypatch.setattr(engine, "match", sabotaged)
    with pytest.raises(DraftpoolError, match="of 4 float32 texts differ from plain decoding"):
        _gate(llama_world, tmp_path)
    assert not list(tmp_path.iterdir())


def test_d07_the_gate_fails_when_nothing_is_accepted(llama_world, tmp_path) -> None:
    world, folder = llama_world, tmp_path / "wrong"
    folder.mkdir()
    state = load_file(world.drafters[2] / "model.safetensors")
    # A vocabulary of one id that no text holds.
    save_file(state | {"vocabulary": torch.tensor([0])}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((world.drafters[2] / "config.json").read_bytes())
    poor = replace(world, drafters=[folder])
    with pytest.raises(DraftpoolError, match="nothing was accepted, so the check shows nothing"):
        _gate(poor, tmp_path)


def test_folders_and_names_must_match(llama_world, tmp_path) -> None:
    world = replace(llama_world, drafters=llama_world.drafters[:2])
    cfg = _lossless_cfg(llama_world)
    with pytest.raises(DraftpoolError, match="2 folders for 3 drafters -> give one folder per drafter"):
        check_lossless(cfg, world.target, world.prompts, world.drafters, tmp_path / "lossless.json")


def test_first_difference_of_two_texts() -> None:
    cases = {
        ((), ()): -1,
        ((1, 2), (1, 2)): -1,
        ((1, 2), (1, 3)): 1,
        ((1,), (1, 2)): 1,
        ((1, 2), (1,)): 1,
        ((2,), (1,)): 0,
    }
    for (one, two), expected in cases.items():
        assert first_difference(list(one), list(two)) == expected
