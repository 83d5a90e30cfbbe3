"""Streams of prompt sets: sessions, sampled and reworded prompts, decoded live and replayed, agree round by round."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tiny import LIMIT, TAPS, live_cfg, named, responses_cfg

from draftpool.artefacts import read_jsonl, read_table, write_json
from draftpool.data.prompt_sets import prepare_set
from draftpool.data.responses import generate_responses
from draftpool.data.streams import session_of
from draftpool.decoding.cost_model import load_costs
from draftpool.decoding.live import decode_live
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.routes import load_routes
from draftpool.replay.run import Stream, prompt_lengths, stream_prompts, with_sessions
from draftpool.replay.score import score_pool
from draftpool.selectors.base import arms_of, make_selector
from draftpool.targets.load import load_tokenizer, prompt_ids

SELECTORS = {
    "ucb": {"kind": "metasd_ucb"},
    "hedge": {"kind": "hedgespec", "learner": "hedge"},
    "soft": {"kind": "hedgespec", "estimator": "soft"},
    "carried": {"kind": "hedgespec", "carry": True},
    "costly": {"kind": "cost_hedge"},
    "cost_ucb": {"kind": "cost_ucb"},
    "routed": {"kind": "router", "features": "tfidf"},
    "exp3": {"kind": "exp3"},
    "full": {"kind": "metasd_ucb", "reward": "bd_full"},
}
POOL, DOMAINS = ["wide", "small", "short"], ["tales", "sums"]
SETS = {
    "talks": {"kind": "sessions", "turns": 2},
    "drawn": {"kind": "sampled"},
    "slips": {"kind": "reworded", "how": "typos", "rate": 0.5},
}
# What a set's stream is told besides: as the plan does.
ANSWERS = {"talks": {"max_new_tokens": LIMIT, "max_prompt_tokens": 60}, "drawn": {}, "slips": {}}
ANSWERS["drawn"] = {"temperature": 1.0, "repeats": 2}


@dataclass
class Made:
    """Folders of one prompt set, and what live decoding made of it."""

    name: str
    prompts: Path
    answers: Path
    table: pd.DataFrame
    costs: Path
    routes: Path
    sequences: pd.DataFrame
    steps: pd.DataFrame


def _costs(folder: Path) -> Path:
    folder.mkdir()
    line = {"fixed": 0.01, "per_token": 0.001}
    costs = {
        "verify": {"1": 1.0, "4": 1.2, "8": 1.3},
        "draft": {"wide": 0.3, "small": 0.1, "short": 0.1},
        "catch_up": dict.fromkeys(POOL, line),
        "evaluate": 0.4,
        "evaluate_catch_up": line,
        "alone": [],
        "ahead": [],
        "positions": dict.fromkeys(POOL),
        "drafted": dict.fromkeys(POOL, 3.0),
        "select": {"bandit": 0.01, "full": 0.02},
    }
    write_json(folder / "costs.json", costs)
    return folder


@pytest.fixture(scope="module", params=SETS)
def made(request, llama_world, tmp_path_factory) -> Made:
    """Every stage from the prompts of two domains to the live tables of one set."""
    world, name = llama_world, request.param
    root = tmp_path_factory.mktemp(name)
    cfg = {"name": name, "domains": DOMAINS, "prompts_per_domain": 2, "seed": 0} | SETS[name]
    prepare_set(cfg, world.prompts, None, root / "prompts")
    options = responses_cfg(domain=name, split="eval", max_new_tokens=LIMIT) | ANSWERS[name]
    generate_responses(options, world.target, root / "prompts", root / "answers")
    temperature = options.get("temperature", 0.0)
    scored = {
        "answers": [{"name": name, "temperature": temperature, "prompts": None, "drafters": None, "bd_full": 9}],
        "pool": POOL, "drafters": named(world), "taps": TAPS, "backend": "fast", "device": "cpu",
    }  # fmt: skip
    score_pool(
        scored, world.target, [root / "answers"], world.drafters, root / "state", root / "table.parquet"
    )
    routes = root / "routes"
    routes.mkdir()
    rows = [f"{row['id']},{name},tfidf,sums,0.9" for row in read_jsonl(root / "prompts" / "eval.jsonl")]
    (routes / "routes.csv").write_text("\n".join(["prompt_id,domain,features,route,probability", *rows]))
    (root / "gate.json").write_text("{}")
    live = live_cfg(
        world, stream=name, domains=[name], prompts_per_domain=None, pool=POOL, selectors=SELECTORS,
        selector_seeds=[0, 1], homes={"short": "sums"}, generalist="wide", temperature=temperature,
        repeats=options.get("repeats", 1), max_prompt_tokens=options["max_prompt_tokens"],
    )  # fmt: skip
    costs, out = _costs(root / "costs"), root / "live"
    decode_live(
        live, world.target, [root / "prompts"], world.drafters, root / "gate.json", costs, routes,
        [root / "answers"] if name == "talks" else [], root / "state" / "live", out,
    )  # fmt: skip
    table = with_sessions(read_table(root / "table.parquet"))
    sequences, steps = read_table(out / "sequences.parquet"), read_table(out / "steps.parquet")
    return Made(name, root / "prompts", root / "answers", table, costs, routes, sequences, steps)


def live_rounds(
    made,
    name: str,
    seed: int,
    columns: tuple[str, ...] = ("arm", "n_accepted", "n_committed", "evaluated"),
) -> dict[tuple[str, int], list[tuple]]:
    """Columns of every round, by session and repeat, turn after turn."""
    own = made.steps[(made.steps.selector == name) & (made.steps.selector_seed == seed)]
    found: dict[tuple[str, int], list[tuple]] = {}
    own = own.assign(session=[session_of(p)[0] for p in own.prompt_id]).assign(
        turn=[session_of(p)[1] for p in own.prompt_id]
    )
    for row in own.sort_values(["session", "repeat", "turn", "round"]).itertuples():
        entry = tuple(getattr(row, column) for column in columns)
        found.setdefault((row.session, row.repeat), []).append(entry)
    return found


@pytest.mark.parametrize("name", SELECTORS)
def test_replay_equals_live_decoding_on_every_kind_of_stream(made, name):
    cfg = SELECTORS[name]
    arms = arms_of(cfg, POOL)
    options = {"domains": [made.name], "prompts_per_domain": None, "order": "shuffled", "seed": 1}
    prompts = stream_prompts(made.table, options)
    stream = Stream(made.name, prompts, made.table, arms, LIMIT, prompt_lengths([made.answers]))
    costs = load_costs(made.costs, arms, stream.answers.k)
    routes = load_routes(made.routes, {"short": "sums"}, arms, "wide")
    order = np.argsort(stream.index, kind="stable")
    assert len(order) == (2 if made.name == "talks" else 8 if made.name == "drawn" else 4)
    for seed in (0, 1):
        selector = make_selector(cfg, arms)
        live = live_rounds(made, name, seed)
        assert len(live) == len(order)
        for place, row in enumerate(order):
            which = np.array([row])
            draws = EpisodeDraws(stream.keys(which, np.array([seed])), len(arms) + 1)
            context = stream.context(costs, routes if name == "routed" else None, which)
            resumed = selector.carries and place > 0
            played = replay(selector, stream.answers, which, draws, context, resumed=resumed)
            head = stream.answers.frame.iloc[row]
            rounds = zip(
                [arms[arm] for arm in played.arms[:, 0]],
                played.accepted[:, 0].tolist(),
                played.committed[:, 0].tolist(),
                played.evaluated[:, 0].tolist(),
                strict=True,
            )
            assert list(rounds) == live[head.prompt_id, head["repeat"]]


@pytest.mark.parametrize("made", ["talks"], indirect=True)
def test_turns_of_a_session_hold_the_target_s_own_answers(made, llama_world):
    answers = read_table(made.answers / "responses.parquet").set_index("prompt_id")
    rows, tokenizer = read_jsonl(made.prompts / "eval.jsonl"), load_tokenizer(llama_world.target)
    assert sorted(answers.index) == sorted(f"{row['id']}.{turn}" for row in rows for turn in (0, 1))
    for row in rows:
        assert [turn["base_domain"] for turn in row["turns"]] in (["tales", "sums"], ["sums", "tales"])
        first, second = (answers.loc[f"{row['id']}.{turn}"] for turn in (0, 1))
        said = tokenizer.decode(first.response_ids, skip_special_tokens=True)
        spoken = [turn["content"] for turn in row["turns"]]
        expected = prompt_ids(
            tokenizer,
            [
                {"role": "user", "content": spoken[0]},
                {"role": "assistant", "content": said},
                {"role": "user", "content": spoken[1]},
            ],
        )
        assert list(second.prompt_ids) == expected and len(expected) > len(first.prompt_ids)
    # Every method wrote the same two turns.
    assert made.sequences.groupby("prompt_id").sha256.nunique().eq(1).all()


@pytest.mark.parametrize("made", ["talks"], indirect=True)
def test_a_learner_goes_on_through_a_session(made):
    own = made.steps[(made.steps.selector == "soft") & (made.steps.selector_seed == 0)]
    first = own[own["round"] == 0].set_index("prompt_id").propensity
    begins = first[[prompt for prompt in first.index if prompt.endswith(".0")]]
    goes_on = first[[prompt for prompt in first.index if prompt.endswith(".1")]]
    assert np.allclose(begins, 1 / 3) and not np.allclose(goes_on, 1 / 3)


def test_sampled_texts_are_those_that_live_decoding_samples(made):
    answers = read_table(made.answers / "responses.parquet")
    live = made.sequences[made.sequences.selector == "plain"].set_index(["prompt_id", "repeat"])
    assert len(answers) == len(live)
    for row in answers.itertuples():
        assert live.loc[(row.prompt_id, row.sample), "n_tokens"] == len(row.response_ids)
    if made.name == "drawn":
        texts = answers.groupby("prompt_id").response_ids.apply(lambda own: len({tuple(ids) for ids in own}))
        assert (texts > 1).any()


def test_a_carried_method_begins_again_where_a_cell_is_missing(llama_world, tmp_path):
    """A killed run must not give the second prompt a learner that never saw the first."""
    world = llama_world
    (tmp_path / "gate.json").write_text("{}")
    cfg = live_cfg(world, selectors={"carried": SELECTORS["carried"]}, homes={}, generalist="small")

    def run(name):
        decode_live(
            cfg, world.target, world.prompts, world.drafters, tmp_path / "gate.json", None, None, [],
            tmp_path / "state" / name, tmp_path / name,
        )  # fmt: skip
        steps = read_table(tmp_path / name / "steps.parquet")
        steps = steps[steps.selector == "carried"]
        return steps.set_index(["prompt_id", "round"]).sort_index()[["arm", "propensity"]]

    whole = run("a")
    cells = sorted((tmp_path / "state").glob("live-*/*.json"))
    assert len(cells) == 4
    broken = json.loads(cells[0].read_text())
    cells[0].write_text(json.dumps(dict(list(broken.items())[:1])))
    pd.testing.assert_frame_equal(run("b"), whole)
