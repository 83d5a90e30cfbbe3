"""The target's answers, the taps beside them, and the streams of held-out prompts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny import TAPS, load, reference_of, responses_cfg, save_prompts, save_target, token_ids

from draftpool.artefacts import read_json, read_jsonl, read_table, write_jsonl
from draftpool.data.generation import answer_prompts
from draftpool.data.responses import generate_responses, repetition
from draftpool.data.streams import build_stream
from draftpool.data.taps import Taps
from draftpool.errors import DraftpoolError
from draftpool.targets.load import load_tokenizer, prompt_ids

EOS = 2


def _generate(model, prompt: list[int], ends: list[int], limit: int) -> list[int]:
    """Greedy decoding by transformers, one prompt alone."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": ends, "pad_token_id": 0}
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return made[0, len(prompt) :].tolist()


def _answers(target, prompts: list[list[int]], *options) -> list:
    """Answers in the order of the prompts."""
    made = dict(answer_prompts(target, prompts, *options))
    assert len(made) == len(prompts)
    return [made[index] for index in range(len(prompts))]


def _fresh_taps(target, ids: list[int]) -> torch.Tensor:
    return target.forward(torch.tensor([ids]), target.new_cache(len(ids)), "none").taps[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("batch", [3, 8])
def test_batched_answers_equal_generate_one_at_a_time(batch, family, targets) -> None:
    target, model = load(getattr(targets, family), TAPS), reference_of(getattr(targets, family))
    prompts = [token_ids(length, seed) for seed, length in enumerate((3, 21, 8, 8, 13, 5, 9, 2))]
    free = [_generate(model, prompt, [0], 18) for prompt in prompts]
    # Ends that stop the answers at different places, one of them at once.
    ends = [free[0][0], free[1][5], free[2][9]]
    expected = [_generate(model, prompt, ends, 18) for prompt in prompts]
    answers = _answers(target, prompts, ends, 18, batch, True)
    assert len({len(answer.ids) for answer in answers}) > 2
    assert {answer.finish for answer in answers} == {"eos", "limit"}
    for prompt, answer, ids in zip(prompts, answers, expected, strict=True):
        assert (answer.prompt, answer.ids) == (prompt, ids)
        assert answer.finish == ("eos" if ids[-1] in ends else "limit")
        fresh = _fresh_taps(target, prompt + ids[:-1]).bfloat16()
        assert answer.taps.dtype == torch.bfloat16
        torch.testing.assert_close(answer.taps, fresh, atol=2e-2, rtol=1e-2)


def test_answers_do_not_depend_on_the_batch(targets) -> None:
    target = load(targets.llama, TAPS)
    prompts = [token_ids(length, seed) for seed, length in enumerate((12, 4, 9, 15, 6))]
    alone = [_answers(target, [prompt], [EOS], 12, 1, False)[0] for prompt in prompts]
    for size in (1, 2, 3, 5, 9):
        for one, two in zip(_answers(target, prompts, [EOS], 12, size, False), alone, strict=True):
            assert (one.ids, one.finish, one.taps) == (two.ids, two.finish, None)


def test_prompts_enter_while_others_are_at_work(targets, monkeypatch) -> None:
    target = load(targets.llama, TAPS)
    prompts = [token_ids(length, seed) for seed, length in enumerate((12, 4, 9, 15, 6, 7, 3, 10))]
    free = _answers(target, prompts, [], 24, 1, False)
    ends = [free[place].ids[step] for place, step in ((3, 2), (0, 6), (7, 9))]
    widths, forward = [], target.forward

    def watched(ids, cache, *rest):
        widths.append((cache.batch, ids.shape[1], max(cache.lengths)))
        return forward(ids, cache, *rest)

    monkeypatch.setattr(target, "forward", watched)
    together = _answers(target, prompts, ends, 24, 4, False)
    reads = [place for place, (_, n, length) in enumerate(widths) if n > 1 and length == 0]
    assert len(reads) > 2 and any(widths[place][0] < 4 for place in reads)
    # The batch stays full while prompts wait, and gets smaller afterwards.
    assert all(batch == 4 for batch, n, _ in widths[: reads[-1]] if n == 1)
    assert widths[-1][0] < 4
    monkeypatch.undo()
    assert [answer.ids for answer in together] == [
        answer.ids for answer in _answers(target, prompts, ends, 24, 1, False)
    ]


def test_sessions_that_became_too_long_are_passed_over(tmp_path) -> None:
    rows = [
        {
            "id": f"s{n}",
            "domain": "talks",
            "prompt": [{"role": "user", "content": "x"}],
            "turns": [{"content": "x"}],
        }
        for n in range(3)
    ]
    write_jsonl(tmp_path / "eval.jsonl", rows)
    arguments = ([tmp_path], lambda messages: [1, 2], 5, 2)
    assert [item.prompt_id for item in build_stream(*arguments)] == ["s0", "s1"]
    assert [item.prompt_id for item in build_stream(*arguments, answered={"s0", "s2"})] == ["s0", "s2"]
    with pytest.raises(DraftpoolError, match="only 1 held-out prompts"):
        build_stream(*arguments, answered={"s1"})


def test_an_answer_of_one_token(targets) -> None:
    target, prompt = load(targets.llama, TAPS), token_ids(6)
    (answer,) = _answers(target, [prompt], [], 1, 4, True)
    assert len(answer.ids) == 1 and answer.finish == "limit" and len(answer.taps) == 6


@given(ids=st.lists(st.integers(0, 2), max_size=25), n=st.integers(1, 5))
def test_repetition_equals_a_loop(ids, n) -> None:
    seen, repeated, total = set(), 0, 0
    for start in range(len(ids) - n + 1):
        gram = tuple(ids[start : start + n])
        repeated += gram in seen
        seen.add(gram)
        total += 1
    assert repetition(ids, n) == pytest.approx(repeated / total if total else 0.0)


# --- the stage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["llama_world", "qwen3_world"])
def test_response_folders_hold_the_answers_and_their_taps(world, request) -> None:
    world = request.getfixturevalue(world)
    target, model, tokenizer = (
        load(world.target, TAPS),
        reference_of(world.target),
        load_tokenizer(world.target),
    )
    finishes = set()
    for folder, prompts, split in zip(
        [*world.train, *world.heldout], world.prompts * 2, ["train"] * 2 + ["eval"] * 2, strict=True
    ):
        table, rows = read_table(folder / "responses.parquet"), read_jsonl(prompts / f"{split}.jsonl")
        taps, covered = Taps(folder), []
        assert table.prompt_id.tolist() == [row["id"] for row in rows]
        assert (
            set(table.split) == {split}
            and set(table["sample"]) == {0}
            and set(table.domain) == {rows[0]["domain"]}
        )
        for row, source in zip(table.itertuples(), rows, strict=True):
            prompt, answer = list(row.prompt_ids), list(row.response_ids)
            assert prompt == prompt_ids(tokenizer, source["prompt"])
            assert source is not rows[-1] or answer == _generate(model, prompt, [EOS], 20)
            assert row.finish == ("eos" if answer[-1] == EOS else "limit")
            assert row.repetition == repetition(answer)
            assert row.response_offset == row.prompt_offset + len(prompt)
            stop = row.response_offset + len(answer) - 1
            covered += range(row.prompt_offset, stop)
            fresh = _fresh_taps(target, prompt + answer[:-1]).bfloat16()
            stored = taps.rows(row.taps_shard, row.prompt_offset, stop)
            torch.testing.assert_close(stored, fresh, atol=2e-2, rtol=1e-2)
            finishes.add(row.finish)
        # Every row belongs to one answer, and a few answers are one shard.
        assert sorted(covered) == list(range(len(covered))) and set(table.taps_shard) == {1}
        with pytest.raises(DraftpoolError, match="no rows"):
            taps.rows(1, len(covered), len(covered) + 1)
        told = read_json(folder / "provenance.json")
        assert (told["answers"], told["tokens"]) == (len(rows), int(table.response_ids.map(len).sum()))
        assert told["too_long"] == 0
    assert finishes == {"eos", "limit"}


def test_shards_hold_the_same_taps_as_one_file(targets, tmp_path, monkeypatch) -> None:
    prompts = save_prompts(tmp_path / "prompts", "tales", 8, 0)
    generate_responses(responses_cfg(), targets.llama, prompts, tmp_path / "whole")
    held = []
    monkeypatch.setattr(
        "draftpool.data.taps.save_file",
        lambda made, path: (held.append(made["taps"].nbytes), save_file(made, path)),
    )
    monkeypatch.setattr("draftpool.data.taps.SHARD_BYTES", 10_000)
    generate_responses(responses_cfg(), targets.llama, prompts, tmp_path / "cut")
    names = sorted(path.name for path in (tmp_path / "cut").glob("taps-*"))
    count = len(names)
    assert count > 2 and names == [f"taps-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert read_json(tmp_path / "cut" / "provenance.json")["shards"] == count
    tables = [read_table(tmp_path / name / "responses.parquet") for name in ("whole", "cut")]
    assert (
        tables[0].prompt_id.tolist() == tables[1].prompt_id.tolist()
        and tables[1].taps_shard.nunique() == count
    )
    largest = 0
    for one, two in zip(tables[0].itertuples(), tables[1].itertuples(), strict=True):
        assert list(one.response_ids) == list(two.response_ids)
        length = len(one.prompt_ids) + len(one.response_ids) - 1
        own = [
            Taps(tmp_path / name).rows(row.taps_shard, row.prompt_offset, row.prompt_offset + length)
            for name, row in (("whole", one), ("cut", two))
        ]
        assert torch.equal(*own)
        largest = max(largest, own[0].nbytes)
    # A shard ends with the answer that fills it; only the last may hold less.
    assert all(10_000 <= size < 10_000 + largest for size in held[:-1]) and held[-1] < 10_000 + largest


@pytest.mark.parametrize("fate", ["missing", "cut short", "none"])
def test_damaged_shards_are_named(fate, targets, tmp_path, monkeypatch) -> None:
    prompts = save_prompts(tmp_path / "prompts", "tales", 8, 0)
    monkeypatch.setattr("draftpool.data.taps.SHARD_BYTES", 10_000)
    generate_responses(responses_cfg(), targets.llama, prompts, tmp_path / "out")
    shards = sorted((tmp_path / "out").glob("taps-*"))
    if fate == "cut short":
        shards[1].write_bytes(shards[1].read_bytes()[:-10])
    for path in shards if fate == "none" else shards[1:2] if fate == "missing" else []:
        path.unlink()
    with pytest.raises(DraftpoolError, match="damaged taps -> delete the folder") as caught:
        Taps(tmp_path / "out")
    assert fate == "none" or str(shards[1]) in str(caught.value)


def test_prompts_that_are_too_long_are_left_out_and_counted(targets, tmp_path) -> None:
    prompts = save_prompts(tmp_path / "prompts", "tales", 8, 0)
    tokenizer = load_tokenizer(targets.llama)
    rows = read_jsonl(prompts / "train.jsonl")
    lengths = [len(prompt_ids(tokenizer, row["prompt"])) for row in rows]
    limit = sorted(lengths)[3]
    generate_responses(
        responses_cfg(max_prompt_tokens=limit, max_new_tokens=3), targets.llama, prompts, tmp_path / "out"
    )
    table = read_table(tmp_path / "out" / "responses.parquet")
    kept = [row["id"] for row, length in zip(rows, lengths, strict=True) if length <= limit]
    assert table.prompt_id.tolist() == kept and 0 < len(kept) < 8
    assert read_json(tmp_path / "out" / "provenance.json")["too_long"] == 8 - len(kept)
    with pytest.raises(
        DraftpoolError, match="max_prompt_tokens.*none of 8 train prompts of `tales` has at most 2 tokens"
    ):
        generate_responses(responses_cfg(max_prompt_tokens=2), targets.llama, prompts, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_interrupted_stage_leaves_nothing(targets, tmp_path, monkeypatch) -> None:
    prompts = save_prompts(tmp_path / "prompts", "tales", 8, 0)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("draftpool.data.taps.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate_responses(responses_cfg(max_new_tokens=2), targets.llama, prompts, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts"]


def test_a_target_of_the_slow_backend_answers_one_at_a_time(tmp_path) -> None:
    folder = save_target(tmp_path / "mistral", "mistral")
    prompts = save_prompts(tmp_path / "prompts", "tales", 3, 0)
    with pytest.warns(UserWarning, match="fast backend"):
        generate_responses(responses_cfg(max_new_tokens=12), folder, prompts, tmp_path / "out")
    model = reference_of(folder)
    for row in read_table(tmp_path / "out" / "responses.parquet").itertuples():
        assert list(row.response_ids) == _generate(model, list(row.prompt_ids), [EOS], 12)


# --- streams --------------------------------------------------------------------------------------------


def _tokenise(messages: list[dict]) -> list[int]:
    return list(range(len(messages[0]["content"].split())))


@pytest.fixture
def folders(tmp_path):
    return [
        save_prompts(tmp_path / name, name, 0, 9, seed)
        for seed, name in enumerate(("tales", "sums", "facts"))
    ]


def test_a_stream_takes_the_first_short_prompts_domain_by_domain(folders) -> None:
    items = build_stream(folders, _tokenise, 9, 3)
    expected = []
    for folder in folders:
        short = [row for row in read_jsonl(folder / "eval.jsonl") if len(_tokenise(row["prompt"])) <= 9]
        expected += [(row["id"], row["domain"], _tokenise(row["prompt"])) for row in short[:3]]
    assert [(item.prompt_id, item.domain, item.ids) for item in items] == expected
    assert [item.index for item in items] == list(range(9))
    assert any(
        len(_tokenise(row["prompt"])) > 9
        for folder in folders
        for row in read_jsonl(folder / "eval.jsonl")[:3]
    )


def test_shuffling_is_a_function_of_its_seed(folders) -> None:
    blocks = [item.prompt_id for item in build_stream(folders, _tokenise, 99, 4)]
    first, again, other = (
        [item.prompt_id for item in build_stream(folders, _tokenise, 99, 4, "shuffled", seed)]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first != blocks and sorted(first) == sorted(other) == sorted(blocks)
    assert [item.index for item in build_stream(folders, _tokenise, 99, 4, "shuffled", 0)] == list(range(12))


def test_too_few_prompts_are_an_error_that_names_the_folder(folders) -> None:
    with pytest.raises(
        DraftpoolError, match="only 9 held-out prompts of at most 99 tokens, 10 wanted"
    ) as caught:
        build_stream(folders, _tokenise, 99, 10)
    assert str(folders[0]) in str(caught.value)
    write_jsonl(folders[1] / "eval.jsonl", [])
    with pytest.raises(DraftpoolError, match="only 0 held-out prompts") as caught:
        build_stream(folders, _tokenise, 99, 2)
    assert str(folders[1]) in str(caught.value)
