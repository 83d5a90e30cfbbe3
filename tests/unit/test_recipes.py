"""Recipes of every kind, further pools, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftpool.config.load import merge, resolve
from draftpool.config.plan import Plan
from draftpool.config.stages import check_kinds, stage_code
from draftpool.errors import DraftpoolError

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow/config.yaml").read_text())
KINDS = {
    "head": {"kind": "eagle", "training": {"steps": 3}},
    "special_head": {"kind": "eagle", "role": "specialist", "per_domain": True, "init": "head-s0"},
    "black": {"kind": "independent", "model": {"n_layers": 1}},
    "lookup": {"kind": "ngram", "draft_tokens": 5},
    "store": {"kind": "suffix"},
    "frozen": {"kind": "suffix", "store": "training", "prompts_per_domain": 2},
    "early": {"kind": "early_exit", "n_layers": 1},
    "theirs": {"kind": "checkpoint", "layout": "dflash", "path": "models/theirs"},
}
POOL = {
    "drafters": ["general-s0", "head-s0", "black-s0", "lookup", "store", "theirs", "plain"],
    "generalist": "general-s0",
}


def plan_of(changes: dict | None = None) -> Plan:
    raw = merge(merge(TINY, {"drafters": KINDS, "pools": {"kinds": POOL}}), changes or {})
    plan = Plan(resolve(raw))
    check_kinds(plan)
    return plan


def test_what_is_not_trained_has_neither_seed_nor_defaults():
    plan = plan_of()
    names = [name for name in plan.runs if not name.startswith(("general", "baseline", "special_m", "depth"))]
    assert names == [
        "black-s0", "early", "frozen", "head-s0", "lookup", "special_head_maths-s0", "store", "theirs",
    ]  # fmt: skip
    assert {name: plan.runs[name].stage for name in names if not plan.runs[name].recipe.trained} == {
        "early": "make_drafter",
        "frozen": "make_drafter",
        "lookup": "make_drafter",
        "store": "make_drafter",
        "theirs": "fetch_drafter",
    }
    assert plan.runs["theirs"].kind == "block" and plan.runs["black-s0"].kind == "independent"


def test_shape_and_objective_of_the_defaults_are_those_of_one_kind():
    plan = plan_of()
    head = plan.runs["head-s0"].recipe
    # The budget of the defaults, the shape and objective of the kind.
    assert head.training.lr == 1.0e-3 and head.training.steps == 3
    assert head.objective.kind == "cross_entropy" and head.model.draft_tokens == 3
    assert plan.drafter("special_head_maths-s0").inputs["init"] == plan.drafter("head-s0").id


def test_a_store_reads_the_training_answers_only_if_they_are_stored():
    plan = plan_of()
    assert plan.drafter("store").inputs["responses"] == []
    assert plan.drafter("frozen").inputs["responses"] == [plan.responses["maths", "train"].id]
    fewer = plan_of({"drafters": {"frozen": {"prompts_per_domain": 1}}})
    assert fewer.drafter("frozen").id != plan.drafter("frozen").id
    assert fewer.drafter("store").id == plan.drafter("store").id


def test_a_published_drafter_changes_with_its_files(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    changes = {"drafters": {"theirs": {"path": str(folder)}}}
    before = plan_of(changes).drafter("theirs").id
    (folder / "model.safetensors").write_bytes(b"12345")
    assert plan_of(changes).drafter("theirs").id != before


def test_a_further_pool_is_measured_and_replayed_apart():
    plan = plan_of({"decode": {"streams": {"own": {"prompts_per_domain": 1, "pool": "kinds"}}}})
    made = plan.by_stage()
    replays = list(made["replay_selectors"].values())
    assert [replay.cfg["pool"] for replay in replays] == [plan.study.pool, POOL["drafters"]]
    assert [sorted(replay.cfg["streams"]) for replay in replays] == [
        ["abroad", "heldout", "mixed", "talks"],
        ["heldout"],
    ]
    costs = [[drafter["name"] for drafter in cost.cfg["drafters"]] for cost in made["profile_costs"].values()]
    assert costs == [plan.study.pool, POOL["drafters"][:-1]]
    own = plan.decodes["own", "float32"].cfg
    assert own["pool"] == POOL["drafters"] and [d["name"] for d in own["drafters"]] == POOL["drafters"][:-1]
    # The main pool's streams have the drafters of its kinds.
    live = [drafter["name"] for drafter in plan.decodes["mixed", "float32"].cfg["drafters"]]
    assert "theirs" in live and not {"head-s0", "lookup", "black-s0"} & set(live)
    assert set(POOL["drafters"][:-1]) <= {drafter["name"] for drafter in plan.lossless.cfg["drafters"]}


def test_a_memory_of_streams_is_scored_along_the_streams_that_its_pools_play():
    score = plan_of().score.cfg
    assert [drafter["name"] for drafter in score["drafters"] if drafter.get("learns")] == ["store"]
    assert set(score["streams"]) == {"heldout"}
    more = plan_of({"pools": {"kinds": {"streams": ["heldout", "abroad"]}}}).score.cfg
    assert set(more["streams"]) == {"heldout", "abroad"}
    # Drafters of a pool are scored where it plays.
    (abroad,) = [answers for answers in more["answers"] if answers["name"] == "stories"]
    assert {"store", "lookup", "black-s0"} <= set(abroad["drafters"])
    none = plan_of({"drafters": {"store": {"store": "none"}}}).score.cfg
    assert none["streams"] == {}


def test_stages_digest_the_code_of_the_kinds_they_load():
    cfg = {"drafters": [{"name": "a", "kind": "block", "id": "a"}], "selectors": {}}
    more = {"drafters": [*cfg["drafters"], {"name": "b", "kind": "eagle", "id": "b"}], "selectors": {}}
    for stage in ("score_pool", "decode_live", "check_lossless", "profile_costs"):
        assert stage_code(stage, cfg) != stage_code(stage, more), stage


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafters": {"x": {"kind": "magic"}}}, ["drafters.x.kind", "unknown kind of drafter", "early_exit"]),
        ({"drafters": {"lookup": {"max_gram": 1}}}, ["drafters.lookup.max_gram", "did you mean `max_ngram`"]),
        ({"drafters": {"head": {"model": {"n_layers": 2}}}}, ["drafters.head.model.n_layers", "unknown key"]),
        ({"drafters": {"head": {"objective": {"kind": "dpace"}}}}, ["head-s0", "same prefix", "forward_kl"]),
        ({"drafters": {"theirs": {"model_id": "a/b"}}}, ["drafters.theirs", "either `path` or `model_id`"]),
        ({"drafters": {"store": {"store_tokens": 0}}}, ["drafters.store.store_tokens", "greater"]),
        ({"drafters": {"early": {"n_layers": 0}}}, ["drafters.early.n_layers"]),
        ({"drafters": {"lookup": {"training": {"steps": 1}}}}, ["drafters.lookup.training", "unknown key"]),
        ({"pools": {"kinds": {"drafters": ["lookup", "nobody"]}}}, ["pools.kinds", "unknown drafter `nobody`"]),
        ({"pools": {"kinds": {"generalist": "baseline-s0"}}}, ["pools.kinds", "generalist is not in the pool"]),
        ({"pools": {"kinds": {"generalist": "plain"}}}, ["pools.kinds", "generalist is not in the pool"]),
        ({"pools": {"kinds": {"drafters": ["lookup", "lookup"]}}}, ["pools.kinds", "named twice"]),
        ({"pools": {"kinds": {"streams": ["nowhere"]}}}, ["pools.kinds.streams", "unknown stream `nowhere`"]),
        ({"pools": {"kinds": {"selectors": ["luck"]}}}, ["pools.kinds", "unknown selector `luck`"]),
        ({"pools": {"main": POOL}}, ["pools.main", "the study's own pool"]),
        ({"decode": {"streams": {"mixed": {"pool": "none"}}}}, ["decode.streams.mixed.pool", "known: kinds"]),
        ({"replay": {"streams": {"abroad": {"pool": "kinds"}}}}, ["replay.streams.abroad.pool"]),
        ({"pool": ["general-s0", "plain"]}, ["pool", "unknown drafter `plain`"]),
        ({"target": {"taps": []}}, ["target.taps"]),
        ({"decode": {"top_p": 0.0}}, ["decode.top_p"]),
        ({"decode": {"temperature": -0.1}}, ["decode.temperature"]),
    ],
)  # fmt: skip
def test_wrong_recipes_and_pools_are_told_in_one_line(changes, words):
    with pytest.raises(DraftpoolError) as error:
        plan_of(changes).by_stage()
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
