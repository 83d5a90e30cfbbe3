"""Pools of all kinds, one of them remembering its stream: decoded live and replayed, they agree round by round."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_replay_streams import ANSWERS, DOMAINS, SETS, live_rounds
from test_training_kinds import cfg_of
from tiny import LIMIT, TAPS, World, live_cfg, responses_cfg

from draftpool.artefacts import read_json, read_table
from draftpool.data.prompt_sets import prepare_set
from draftpool.data.responses import generate_responses
from draftpool.decoding.cost_model import load_costs
from draftpool.decoding.costs import profile_costs
from draftpool.decoding.live import decode_live
from draftpool.decoding.lossless import check_lossless
from draftpool.drafters.make import make_drafter
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.run import Stream, prompt_lengths, replay_selectors, stream_prompts, with_sessions
from draftpool.replay.score import score_pool
from draftpool.selectors.base import arms_of, make_selector
from draftpool.training.train import train_drafter

SELECTORS = {
    "turns": {"kind": "round_robin"},
    "ucb": {"kind": "metasd_ucb"},
    "be": {"kind": "metasd_ucb", "reward": "be"},
    "hedge": {"kind": "hedgespec"},
    "soft": {"kind": "hedgespec", "estimator": "soft"},
    "token": {"kind": "hedgespec", "loss": "token"},
    "carried": {"kind": "hedgespec", "carry": True},
    "cost_ucb": {"kind": "cost_ucb"},
    "cost_hedge": {"kind": "cost_hedge"},
}
OPTIONS = {
    "suffix": {"kind": "suffix", "draft_tokens": 5, "store": "stream", "store_tokens": 24},
    "retrieval": {
        "kind": "suffix",
        "draft_tokens": 4,
        "store": "training",
        "store_tokens": 4000,
        "prompts_per_domain": 2,
    },
    "ngram": {"kind": "ngram", "draft_tokens": 6, "max_ngram": 2},
    "early_exit": {"kind": "early_exit", "n_layers": 3, "draft_tokens": 2},
}
POOL = ["small", "eagle", "independent", "early_exit", "ngram", "retrieval", "suffix", "plain"]


@dataclass
class Pool:
    """Drafters of every kind in folders."""

    world: World
    folders: dict[str, Path]
    drafters: list[dict] = field(default_factory=list)


@pytest.fixture(scope="module")
def pool(llama_world, tmp_path_factory) -> Pool:
    root = tmp_path_factory.mktemp("kinds")
    folders = {"small": llama_world.drafters[1]}
    for kind in ("eagle", "independent"):
        folders[kind] = root / kind
        train_drafter(
            cfg_of(kind, 60), llama_world.target, llama_world.train, None, root / f"{kind}-state", root / kind
        )
    for name, options in OPTIONS.items():
        folders[name] = root / name
        make_drafter(options, llama_world.train if name == "retrieval" else [], root / name)
    kinds = {"small": "block", "retrieval": "suffix"}
    drafters = [
        {"name": name, "kind": kinds.get(name, name), "id": name}
        | ({"learns": True} if name == "suffix" else {})
        for name in folders
    ]
    return Pool(llama_world, folders, drafters)


@pytest.fixture(scope="module")
def costs(pool, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("costs") / "costs"
    cfg = {"drafters": pool.drafters, "repeats": 3, "dtype": "float32", "taps": TAPS}
    profile_costs(
        cfg | {"backend": "fast", "device": "cpu"},
        pool.world.target,
        pool.world.heldout,
        list(pool.folders.values()),
        out,
    )
    return out


def test_every_part_of_every_kind_has_a_price(pool, costs) -> None:
    made = read_json(costs / "costs.json")
    # Model-free drafters propose as much as they find.
    assert set(made["verify"]) == {str(width) for width in range(1, 8)}
    names = set(pool.folders)
    assert set(made["draft"]) == set(made["catch_up"]) == set(made["memory"]) == names
    assert set(made["alone"]) == names
    for name, sizes in made["memory"].items():
        assert (sizes["weights"] > 0) == (name in ("small", "eagle", "independent")) and sizes["state"] > 0
    model = load_costs(costs, tuple(POOL), np.array([3, 3, 3, 2, 6, 4, 5, 0]))
    assert np.isfinite(model.widths[1:]).all() and model.alone.tolist() == [True] * 7 + [False]


@dataclass
class Made:
    name: str
    cfg: dict
    stream: dict
    prompts: list[Path]
    answers: list[Path]
    acceptance: Path
    table: pd.DataFrame
    steps: pd.DataFrame
    root: Path


def _decode(made_cfg, pool, prompts, answers, costs, root, name) -> Path:
    out = root / name
    decode_live(
        made_cfg, pool.world.target, prompts, list(pool.folders.values()), root / "gate.json", costs, None,
        answers if made_cfg["stream"] == "talks" else [], root / "state" / "live", out,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module", params=["plain", *SETS])
def made(request, pool, costs, tmp_path_factory) -> Made:
    """Every stage from the prompts of two domains to the live tables of a stream."""
    world, name, root = pool.world, request.param, tmp_path_factory.mktemp(request.param)
    options = responses_cfg(domain=name, split="eval", max_new_tokens=20)
    if name == "plain":
        prompts, answers, domains = world.prompts, world.heldout, DOMAINS
    else:
        cfg = {"name": name, "domains": DOMAINS, "prompts_per_domain": 2, "seed": 0} | SETS[name]
        prepare_set(cfg, world.prompts, None, root / "prompts")
        options |= ANSWERS[name]
        generate_responses(options, world.target, root / "prompts", root / "answers")
        prompts, answers, domains = [root / "prompts"], [root / "answers"], [name]
    temperature = options.get("temperature", 0.0)
    stream = {"domains": domains, "prompts_per_domain": 2, "order": "shuffled", "seed": 1, "limit": LIMIT}
    scored = {
        "answers": [
            {"name": one, "temperature": temperature, "prompts": None, "drafters": None, "bd_full": 0}
            for one in domains
        ],
        "pool": [], "drafters": pool.drafters, "streams": {name: stream, "heldout": stream | {"limit": None}},
        "taps": TAPS, "backend": "fast", "device": "cpu",
    }  # fmt: skip
    acceptance = root / "table.parquet"
    score_pool(scored, world.target, answers, list(pool.folders.values()), root / "state" / "s", acceptance)
    (root / "gate.json").write_text("{}")
    cfg = live_cfg(
        world, stream=name, domains=domains, prompts_per_domain=2, pool=POOL, drafters=pool.drafters,
        selectors=SELECTORS, selector_seeds=[0, 1], homes={}, generalist="small", temperature=temperature,
        repeats=options.get("repeats", 1), max_prompt_tokens=options["max_prompt_tokens"],
    )  # fmt: skip
    out = _decode(cfg, pool, prompts, answers, costs, root, "live")
    table = with_sessions(read_table(acceptance).astype({"drafter": str}))
    steps = read_table(out / "steps.parquet")
    return Made(name, cfg, stream, prompts, answers, acceptance, table, steps, root)


@pytest.mark.parametrize("name", [*SELECTORS, *(f"fixed:{arm}" for arm in POOL[:-1])])
def test_replay_equals_live_decoding_for_every_kind(made, costs, name) -> None:
    fixed = name.startswith("fixed:")
    cfg = {"kind": "fixed", "arm": name[6:]} if fixed else SELECTORS[name]
    arms = tuple(POOL) if fixed else arms_of(cfg, POOL)
    own = made.table[made.table.stream.isin(["", made.name])]
    prompts = stream_prompts(own, made.stream)
    stream = Stream(made.name, prompts, own, arms, LIMIT, prompt_lengths(made.answers))
    model = load_costs(costs, arms, stream.answers.k)
    order = np.argsort(stream.index, kind="stable")
    for seed in (0,) if fixed else (0, 1):
        selector, live = make_selector(cfg, arms), live_rounds(made, name, seed)
        assert len(live) == len(order) > 1
        for place, row in enumerate(order):
            which = np.array([row])
            draws = EpisodeDraws(stream.keys(which, np.array([seed])), len(arms) + 1)
            context = stream.context(model, None, which)
            resumed = selector.carries and place > 0
            played = replay(selector, stream.answers, which, draws, context, resumed=resumed)
            head = stream.answers.frame.iloc[row]
            rounds = list(
                zip(
                    [arms[arm] for arm in played.arms[:, 0]],
                    played.accepted[:, 0].tolist(),
                    played.committed[:, 0].tolist(),
                    played.evaluated[:, 0].tolist(),
                    strict=True,
                )
            )
            assert rounds == live[head.prompt_id, head["repeat"]]
            drafted = live_rounds(made, name, seed, ("n_drafted",))[head.prompt_id, head["repeat"]]
            assert [(count,) for count in played.drafted[:, 0].tolist()] == drafted


def test_rewards_of_a_pool_with_model_free_arms_are_the_probability_of_the_proposed_token(made) -> None:
    rows = made.table[made.table.stream.isin(["", made.name])].set_index(
        ["drafter", "prompt_id", "repeat", "position"]
    )
    checked = 0
    for step in made.steps[made.steps.selector == "turns"].itertuples():
        if step.arm == "plain":
            assert np.isnan(step.reward_bd)
            continue
        row = rows.loc[(step.arm, step.prompt_id, step.repeat, step.position)]
        slots = min(step.n_accepted + 1, len(row.gamma_hard), LIMIT - 1 - step.position)
        expected = np.mean(row.gamma_hard[:slots]) if slots else np.nan
        assert step.reward_bd == pytest.approx(expected, abs=1e-4, nan_ok=True)
        checked += slots > 0
    assert checked > 3


def test_a_store_is_fed_what_was_written_whichever_arm_drafted(made) -> None:
    """Later prompts of a stream draft from earlier answers; other streams and limits have rows of their own."""
    own = made.table[made.table.drafter == "suffix"]
    assert set(own.stream) == {made.name, "heldout"}
    assert set(made.table[made.table.drafter != "suffix"].stream) == {""}
    assert not own.duplicated(["stream", "prompt_id", "repeat", "position"]).any()


def test_a_broken_off_run_goes_on_with_the_same_memories(made, pool, costs) -> None:
    if made.name != "plain":
        pytest.skip("one stream tells")
    cells = sorted((made.root / "state").glob("live-*/*.json"))
    assert len(cells) == 4
    last = json.loads(cells[-1].read_text())
    cells[-1].unlink()
    again = _decode(made.cfg, pool, made.prompts, made.answers, costs, made.root, "again")
    columns = ["selector", "selector_seed", "prompt_id", "round", "arm", "n_drafted", "n_accepted"]
    # Carried learners begin again with the first prompt, all else goes on.
    left, right = (
        table[columns].sort_values(columns[:4]).reset_index(drop=True)
        for table in (made.steps, read_table(again / "steps.parquet"))
    )
    pd.testing.assert_frame_equal(left, right)
    assert any(cell["answers"] for cell in last.values())


def test_a_pool_with_all_kinds_is_replayed_as_a_stage(made, costs) -> None:
    if made.name != "plain":
        pytest.skip("one stream tells")
    cfg = {
        "pool": POOL, "homes": {}, "generalist": "small", "selectors": SELECTORS, "few": [], "few_seeds": 1,
        "pool_sizes": None, "streams": {made.name: made.stream | {"seeds": 3}},
    }  # fmt: skip
    replay_selectors(cfg, made.acceptance, costs, made.answers, None, made.root / "replay")
    answers = read_table(made.root / "replay" / "answers.parquet")
    assert set(answers.selector) == {"plain", *SELECTORS, *(f"fixed:{arm}" for arm in POOL[:-1])}
    assert (answers.seconds > 0).all()


def test_the_gate_passes_with_every_kind(pool, tmp_path) -> None:
    cfg = {
        "prompts_per_domain": 3, "max_new_tokens": 20, "max_prompt_tokens": 20, "bfloat16_prompts": 0,
        "drafters": pool.drafters, "taps": TAPS, "backend": "fast", "device": "cpu", "seed": 0,
    }  # fmt: skip
    check_lossless(
        cfg, pool.world.target, pool.world.prompts, list(pool.folders.values()), tmp_path / "gate.json"
    )
    assert read_json(tmp_path / "gate.json")["float32"]["mismatches"] == 0
