"""The acceptance table is what live decoding does, anchor by anchor."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from scripted import fresh_draft, run
from tiny import TAPS, load

from draftpool.artefacts import read_table, write_table
from draftpool.drafters.block_live import BlockDrafter, load_model
from draftpool.errors import DraftpoolError
from draftpool.replay import score
from draftpool.replay.score import score_pool


def _cfg(world, **changes) -> dict:
    drafters = [{"name": name, "kind": "block", "id": name} for name in world.names]
    return {
        "answers": [
            {"name": name, "temperature": 0.0, "prompts": None, "drafters": None, "bd_full": 0}
            for name in ("tales", "sums")
        ],
        "pool": [],
        "drafters": drafters,
        "taps": TAPS,
        "backend": "fast",
        "device": "cpu",
    } | changes


def _nudge(weights: Path) -> None:
    """Change weights a little, as a training under other code would."""
    state = load_file(weights)
    state["fuse.weight"] += 0.01
    save_file(state, weights)


@pytest.fixture(scope="module", params=["llama_world", "qwen3_world"])
def scored(request, tmp_path_factory):
    """World, target, and the acceptance table of its training answers (more text than the held-out ones)."""
    world = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp("score")
    score_pool(
        _cfg(world), world.target, world.train, world.drafters, folder / "state", folder / "table.parquet"
    )
    answers = pd.concat([read_table(path / "responses.parquet") for path in world.train])
    return world, load(world.target, TAPS), read_table(folder / "table.parquet"), answers


def test_d28_table_equals_live_decoding_round_by_round(scored) -> None:
    world, target, table, answers = scored
    rounds = accepted = rejected = 0
    for path in world.drafters:
        drafter = BlockDrafter(path.name, load_model(path, target))
        rows = table[table.drafter == path.name].set_index(["prompt_id", "position"])
        for answer in answers.iloc[::2].itertuples():
            result = run(
                target,
                list(answer.prompt_ids),
                {path.name: drafter},
                limit=20,
                ends={2},
                k_pool=int(table.k.max()),
            )
            assert result.tokens == list(answer.response_ids)
            for live in result.rounds:
                row = rows.loc[(answer.prompt_id, live["position"])]
                assert (live["n_drafted"], live["n_accepted"]) == (row.k, row.accepted)
                assert live["n_committed"] == row.committed
                assert live["reward_bd"] == pytest.approx(row.reward_bd, abs=1e-5)
                rounds, accepted = rounds + 1, accepted + row.accepted
                rejected += row.accepted < row.k
    assert rounds > 100 and accepted > 10 and rejected > 10


def _naive_rows(drafter: BlockDrafter, target, prompt: list[int], answer: list[int]) -> list[dict]:
    """One anchor at a time, each drafted from a fresh context and compared token by token."""
    ids = prompt + answer
    logits = target.forward(torch.tensor([ids]), target.new_cache(len(ids))).logits[0].double()
    rows = []
    for position in range(len(answer) - 1):
        draft = fresh_draft(drafter, target, prompt + answer[: position + 1])
        left = len(answer) - 1 - position
        ahead = answer[position + 1 :]
        accepted = 0
        while accepted < min(drafter.k, left) and int(draft.ids[accepted]) == ahead[accepted]:
            accepted += 1
        gamma = []
        for slot in range(min(drafter.k, left)):
            p = logits[len(prompt) + position + slot].softmax(-1)
            q = dict(zip(draft.vocabulary.tolist(), draft.log_q[slot].double().exp().tolist(), strict=True))
            gamma.append(sum(min(float(p[token]), share) for token, share in q.items()))
        rows.append(
            {
                "position": position,
                "left": left,
                "k": drafter.k,
                "accepted": accepted,
                "committed": min(accepted + 1, left),
                "censored": accepted == drafter.k or accepted == left,
                "gamma": gamma,
                "reward_bd": float(np.mean(gamma[: accepted + 1])),
            }
        )
    return rows


def test_d28_table_equals_one_anchor_at_a_time(scored) -> None:
    world, target, table, answers = scored
    for path in world.drafters:
        drafter = BlockDrafter(path.name, load_model(path, target))
        for answer in answers.iloc[[0, 2]].itertuples():
            rows = table[(table.drafter == path.name) & (table.prompt_id == answer.prompt_id)]
            expected = _naive_rows(drafter, target, list(answer.prompt_ids), list(answer.response_ids))
            assert len(rows) == len(expected)
            for row, wanted in zip(rows.to_dict("records"), expected, strict=True):
                for name in ("position", "left", "k", "accepted", "committed", "censored"):
                    assert row[name] == wanted[name], name
                np.testing.assert_allclose(row["gamma"], wanted["gamma"], atol=1e-5)
                assert row["reward_bd"] == pytest.approx(wanted["reward_bd"], abs=1e-5)
                assert (row["domain"], row["repeat"]) == (answer.domain, 0)


def test_every_anchor_of_every_answer_is_scored_once(scored) -> None:
    world, _, table, answers = scored
    assert not table.duplicated(["prompt_id", "drafter", "position"]).any()
    wanted = {answer.prompt_id: max(0, len(answer.response_ids) - 1) for answer in answers.itertuples()}
    for _, rows in table.groupby("drafter"):
        assert rows.groupby("prompt_id").size().to_dict() == {key: n for key, n in wanted.items() if n}
    assert set(table.drafter) == set(world.names) and set(table.domain) == {"tales", "sums"}
    assert table.groupby("drafter").k.first().to_dict() == {"wide": 7, "small": 3, "short": 3}
    assert table.censored.any() and not table.censored.all()


def test_a_domain_that_was_scored_is_not_scored_again(llama_world, tmp_path, monkeypatch) -> None:
    answers = [
        {"name": name, "temperature": 0.0, "prompts": 2, "drafters": None, "bd_full": 0}
        for name in ("tales", "sums")
    ]
    world, cfg = llama_world, _cfg(llama_world, answers=answers)
    arguments = (cfg, world.target, world.heldout, world.drafters, tmp_path / "state")
    score_answers, calls = score._score_answers, []

    def interrupted(target, drafters, *others):
        calls.append(sorted(drafters))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score_answers(target, drafters, *others)

    monkeypatch.setattr(score, "_score_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score_pool(*arguments, tmp_path / "table.parquet")
    assert not (tmp_path / "table.parquet").exists()
    score_pool(*arguments, tmp_path / "table.parquet")
    assert calls == [sorted(world.names)] * 3
    # Another drafter computes only itself, and so does one made again with other weights under the same name.
    cfg["drafters"].append({"name": "again", "kind": "block", "id": "again"})
    again, tables = tmp_path / "again", []
    for source in world.drafters[:2]:
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(source, again)
        if source == world.drafters[0]:
            _nudge(again / "model.safetensors")
        score_pool(*arguments[:3], [*world.drafters, again], tmp_path / "state", tmp_path / "more.parquet")
        tables.append(read_table(tmp_path / "more.parquet"))
    # The second time the weights are those of `small`, which are known.
    assert calls[3:] == [["again"]] * 2
    table = tables[1]
    assert not table.duplicated(["prompt_id", "drafter", "position"]).any()
    columns = ["prompt_id", "position", "accepted", "reward_bd"]
    first, second = (
        table[table.drafter == name][columns].reset_index(drop=True) for name in ("small", "again")
    )
    pd.testing.assert_frame_equal(first, second)
    before = tables[0][tables[0].drafter == "again"][columns].reset_index(drop=True)
    assert not before.equals(second)
    pd.testing.assert_frame_equal(
        read_table(tmp_path / "table.parquet").astype({"drafter": str}),
        table[table.drafter != "again"].reset_index(drop=True).astype({"drafter": str}),
    )


def test_answers_of_another_model_are_refused(llama_world, qwen3_world, tmp_path) -> None:
    world = llama_world
    arguments = (_cfg(world), world.target, qwen3_world.heldout, world.drafters, tmp_path / "state")
    with pytest.raises(DraftpoolError, match="not the target's own"):
        score_pool(*arguments, tmp_path / "table.parquet")
    assert not (tmp_path / "table.parquet").exists()


def test_an_answer_of_one_token_has_no_anchor(llama_world, tmp_path) -> None:
    world = llama_world
    frame = read_table(world.heldout[0] / "responses.parquet")
    frame["response_ids"] = [ids[: 1 if row == 0 else None] for row, ids in enumerate(frame.response_ids)]
    folder = tmp_path / "answers"
    write_table(folder / "responses.parquet", frame)
    cfg = _cfg(
        world,
        answers=[{"name": "tales", "temperature": 0.0, "prompts": None, "drafters": None, "bd_full": 0}],
    )
    score_pool(cfg, world.target, [folder], world.drafters, tmp_path / "s", tmp_path / "table.parquet")
    assert frame.prompt_id[0] not in set(read_table(tmp_path / "table.parquet").prompt_id)


@pytest.mark.parametrize("together", [4, 5, 100])
def test_drafts_are_read_the_same_however_many_at_a_time(llama_world, monkeypatch, together) -> None:
    """Against one anchor at a time; 13 anchors leave a rest of 1, of 3 and none."""
    target = load(llama_world.target, TAPS)
    answers = read_table(llama_world.train[0] / "responses.parquet")
    row = next(row for row in answers.itertuples() if len(row.response_ids) >= 14)
    prompt, answer = list(map(int, row.prompt_ids)), list(map(int, row.response_ids))[:14]
    drafts = torch.randint(5, 60, (13, 3), generator=torch.Generator().manual_seed(0))
    expected = []
    for place in range(13):
        ids = [*prompt, *answer[: place + 1], *drafts[place].tolist()]
        logits = target.forward(torch.tensor([ids]), target.new_cache(len(ids))).logits[0]
        expected.append(logits[-4:-1])
    monkeypatch.setattr(score, "READ_TOGETHER", together)
    read = score.read_drafts(target, prompt, answer)
    # Twice: the second drafter's blocks must not see the first one's.
    for _ in range(2):
        torch.testing.assert_close(read(drafts), torch.stack(expected), atol=1e-4, rtol=1e-4)
