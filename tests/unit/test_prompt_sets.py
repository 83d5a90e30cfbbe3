"""Prompt sets: other words for the same requests, and sessions of turns from different domains."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import responses_cfg, save_prompts

from draftpool.artefacts import read_json, read_jsonl, read_table, write_jsonl
from draftpool.data.prompt_sets import prepare_set
from draftpool.data.responses import generate_responses
from draftpool.data.reword import LLM, REASONING, TEMPLATES, framed, typos
from draftpool.data.streams import session_of, turn_id, turns_of
from draftpool.errors import DraftpoolError

TEXT = "Please explain carefully why the quick brown fox jumps.\n\n```python\nreturn elements\n```\nAnswer Briefly."
DOMAINS = ("tales", "sums", "odes")


@pytest.fixture
def prompts(tmp_path):
    return [save_prompts(tmp_path / domain, domain, 0, 3, seed) for seed, domain in enumerate(DOMAINS)]


def run(tmp_path, prompts, model=None, **options) -> list[dict]:
    cfg = {"name": "new", "domains": list(DOMAINS), "prompts_per_domain": 2, "seed": 0} | options
    prepare_set(cfg, prompts, model, tmp_path / "out")
    return read_jsonl(tmp_path / "out" / "eval.jsonl")


def test_typos_change_words_and_leave_code_alone():
    changed = typos(TEXT, 0.5, 0, "a")
    assert changed == typos(TEXT, 0.5, 0, "a") != typos(TEXT, 0.5, 1, "a")
    assert "```python\nreturn elements\n```" in changed
    before, after = TEXT.split(), changed.split()
    assert len(before) == len(after)
    # Eight words of four letters and more stand outside the code; half of them have a slip.
    different = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(different) == 4
    for old, new in different:
        assert old[0] == new[0] and abs(len(old) - len(new)) <= 1


@given(st.text(alphabet="abcdefgh XYZ\n`.", max_size=80), st.floats(0.01, 1.0), st.integers(0, 5))
def test_typos_never_fail_and_keep_the_words_apart(text, rate, seed):
    changed = typos(text, rate, seed)
    assert len(changed.split()) == len(text.split())
    assert (changed == text) or re.search(r"[A-Za-z]{4}", text)


@pytest.mark.parametrize("frames", [REASONING, TEMPLATES])
def test_frames_hold_the_whole_request(frames):
    made = {framed(TEXT, frames, seed, "p") for seed in range(40)}
    assert len(made) == len(frames) and all(TEXT in text for text in made)
    # A request with braces is no template.
    assert "{text}{0}" in framed("{text}{0}", frames, 0, "p")


def test_long_instructions_are_long():
    assert all(len(frame) > 250 for frame in REASONING)


def test_rows_of_a_set_say_what_they_were(tmp_path, prompts):
    rows = run(tmp_path, prompts, kind="reworded", how="template")
    assert [row["base_domain"] for row in rows] == ["tales"] * 2 + ["sums"] * 2 + ["odes"] * 2
    originals = {row["id"]: row for folder in prompts for row in read_jsonl(folder / "eval.jsonl")}
    for row in rows:
        assert row["domain"] == "new" and row["id"] not in originals and row["id"].startswith("new-")
        original = originals[row["base_id"]]["prompt"][0]["content"]
        assert original in row["prompt"][0]["content"] != original
    assert len({row["id"] for row in rows}) == 6
    assert run(tmp_path, prompts, kind="reworded", how="template") == rows
    assert run(tmp_path, prompts, kind="reworded", how="template", seed=1) != rows


def test_sampled_sets_keep_the_text(tmp_path, prompts):
    for row in run(tmp_path, prompts, kind="sampled"):
        base = next(r for f in prompts for r in read_jsonl(f / "eval.jsonl") if r["id"] == row["base_id"])
        assert row["prompt"] == base["prompt"]


def test_sessions_change_the_domain_with_every_turn(tmp_path, prompts):
    rows = run(tmp_path, prompts, kind="sessions", turns=3)
    assert len(rows) == 2
    used = [turn["base_id"] for row in rows for turn in row["turns"]]
    assert len(set(used)) == 6
    for row in rows:
        assert {turn["base_domain"] for turn in row["turns"]} == set(DOMAINS)
        assert [message[0]["content"] for message in turns_of(row)] == [t["content"] for t in row["turns"]]
    # Two turns of three domains leave one prompt out.
    assert len(run(tmp_path, prompts, kind="sessions", turns=2)) == 2
    assert session_of(turn_id("new-1", 2)) == ("new-1", 2) and session_of("new-1") == ("new-1", 0)


def test_a_model_says_it_in_its_own_words(tmp_path, prompts, targets):
    options = {"backend": "fast", "device": "cpu", "batch_sequences": 4}
    rows = run(tmp_path, prompts, targets.llama, kind="reworded", how="llm", **options)
    texts = [row["prompt"][0]["content"] for row in rows]
    assert all(texts) and len(set(texts)) > 1
    assert not any(LLM.split("{")[0] in text for text in texts)
    again = run(
        tmp_path, prompts, targets.llama, kind="reworded", how="llm", **options | {"batch_sequences": 1}
    )
    assert again == rows


def test_too_few_prompts_and_too_many_turns_are_told(tmp_path, prompts):
    with pytest.raises(
        DraftpoolError, match=r"new.prompts_per_domain`: tales has 3 held-out prompts, 4 wanted"
    ):
        run(tmp_path, prompts, kind="sampled", prompts_per_domain=4)
    with pytest.raises(DraftpoolError, match=r"new.turns`: 4 turns from 3 domains"):
        run(tmp_path, prompts, kind="sessions", turns=4)
    assert not (tmp_path / "out").exists()


def test_a_session_that_becomes_too_long_is_left_out_whole(tmp_path, targets):
    rows = [
        {"id": f"s{n}", "domain": "talks", "split": "eval", "prompt": [{"role": "user", "content": "fox"}]}
        | {"turns": [{"content": "fox"}, {"content": "the dog " * (1 if n else 30)}]}
        for n in range(2)
    ]
    write_jsonl(tmp_path / "p" / "eval.jsonl", rows)
    cfg = responses_cfg(domain="talks", split="eval", max_new_tokens=6, max_prompt_tokens=50)
    generate_responses(cfg, targets.llama, tmp_path / "p", tmp_path / "a")
    assert read_table(tmp_path / "a" / "responses.parquet").prompt_id.tolist() == ["s1.0", "s1.1"]
    assert read_json(tmp_path / "a" / "provenance.json")["too_long"] == 1
