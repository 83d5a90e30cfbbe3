"""decode_live as a stage: files, columns, resuming, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scripted import naive_text
from tiny import LIMIT, MAX_POSITIONS, TAPS, live_cfg, load, reference_of

from draftpool.artefacts import read_table, write_json
from draftpool.config.digest import code_digest
from draftpool.decoding import live, methods
from draftpool.decoding.engine import Result
from draftpool.decoding.live import decode_live, sha256_of_ids
from draftpool.errors import DraftpoolError

# The contract of `docs/metrics.md`.
COMMON = {
    "run_id",
    "stream",
    "selector",
    "selector_seed",
    "repeat",
    "prompt_id",
    "domain",
    "prompt_index",
    "dtype",
}
STEPS = COMMON | {
    "round",
    "arm",
    "position",
    "n_drafted",
    "n_accepted",
    "n_committed",
    "hit_eos",
    "hit_limit",
    "reward_be",
    "reward_bd",
}
STEPS |= {
    "propensity",
    "losses",
    "evaluated",
    "t_select",
    "t_draft",
    "t_verify",
    "t_evaluate",
    "t_switch",
    "t_commit",
}
SEQUENCES = COMMON | {
    "sha256",
    "n_tokens",
    "rounds",
    "wall_time",
    "t_prefill",
    "plain_wall_time",
    "plain_n_tokens",
    "plain_sha256",
}
SEQUENCES |= {"matches_plain", "first_mismatch", "top2_margin"}
KEY = ["stream", "selector", "selector_seed", "repeat", "prompt_id"]
SELECTORS = {
    "random": {"kind": "random"},
    "hedge": {"kind": "hedgespec"},
    "ucb": {"kind": "metasd_ucb", "reward": "bd", "beta": 0.25},
}


# --- live decoding --------------------------------------------------------------------------------------


def _answers(world) -> pd.DataFrame:
    tables = [read_table(path / "responses.parquet") for path in world.heldout]
    return pd.concat(tables).set_index("prompt_id")


class Live:
    """One study folder in which decode_live is run again and again."""

    def __init__(self, world, folder: Path, monkeypatch):
        self.world, self.folder = world, folder
        self.decoded: list[str] = []
        write_json(folder / "lossless.json", {})
        decode = live.decode

        def counted(target, start, arms, selector, sampling, *rest, **options):
            # Warm-up has a limit of its own.
            if sampling.max_new_tokens == LIMIT:
                self.decoded.append(f"{selector.kind}:{','.join(arms)}")
            self.before_decode()
            return decode(target, start, arms, selector, sampling, *rest, **options)

        monkeypatch.setattr(live, "decode", counted)

    def before_decode(self) -> None:
        """Hook of the tests."""

    def run(self, name: str = "out", **changes) -> tuple[pd.DataFrame, pd.DataFrame]:
        self.decoded.clear()
        out, world = self.folder / name, self.world
        state, gate = self.folder / "state" / name, self.folder / "lossless.json"
        decode_live(
            live_cfg(world, **changes),
            world.target,
            world.prompts,
            world.drafters,
            gate,
            None,
            None,
            [],
            state,
            out,
        )
        return read_table(out / "sequences.parquet"), read_table(out / "steps.parquet")


@pytest.fixture
def study(llama_world, tmp_path, monkeypatch) -> Live:
    return Live(llama_world, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def finished(llama_world, tmp_path_factory) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables of a run with three selectors at two seeds."""
    with pytest.MonkeyPatch.context() as patched:
        study = Live(llama_world, tmp_path_factory.mktemp("finished"), patched)
        tables = study.run(selectors=SELECTORS, selector_seeds=[0, 1])
        assert len(study.decoded) == len(tables[0])
    return tables


def test_d01_d08_live_tables_hold_what_the_contract_says(finished, llama_world) -> None:
    (sequences, steps), world = finished, llama_world
    assert set(sequences) == SEQUENCES and set(steps) == STEPS
    methods = {("plain", 0)} | {(f"fixed:{name}", 0) for name in world.names}
    methods |= {(name, seed) for name in SELECTORS for seed in (0, 1)}
    assert set(zip(sequences.selector, sequences.selector_seed, strict=True)) == methods
    assert len(sequences) == 4 * len(methods)
    assert not sequences.duplicated(KEY).any() and not steps.duplicated([*KEY, "round"]).any()
    assert set(sequences.run_id) == set(steps.run_id) == {"out"} and set(sequences.dtype) == {"float32"}
    assert sequences.matches_plain.all() and (sequences.first_mismatch == -1).all()
    assert (sequences.sha256 == sequences.plain_sha256).all() and sequences.top2_margin.isna().all()
    model, answers = reference_of(world.target), _answers(world)
    assert sequences.groupby("prompt_id").prompt_index.nunique().eq(1).all() and set(
        sequences.prompt_index
    ) == set(range(4))
    for prompt_id, rows in sequences.groupby("prompt_id"):
        text = naive_text(model, list(answers.prompt_ids[prompt_id]), LIMIT, 0.0, 0, prompt_id)
        text = text[: text.index(2) + 1] if 2 in text else text
        assert set(rows.sha256) == {sha256_of_ids(text)} and set(rows.n_tokens) == {len(text)}
    totals = steps.groupby(KEY).agg(committed=("n_committed", "sum"), counted=("round", "size"))
    joined = sequences.set_index(KEY).join(totals).fillna({"committed": 0, "counted": 0})
    assert (joined.n_tokens == joined.committed + 1).all() and (joined.rounds == joined.counted).all()
    speculative = steps[steps.selector != "plain"]
    assert 0 < speculative.n_accepted.sum() < speculative.n_drafted.sum()
    parts = [name for name in steps if name.startswith("t_")]
    times = steps.assign(time=steps[parts].sum(axis=1)).groupby(KEY).time.sum()
    np.testing.assert_allclose(sequences.set_index(KEY).wall_time.loc[times.index], times, rtol=1e-9)


def test_columns_of_each_method(finished) -> None:
    _, steps = finished
    plain, fixed = steps[steps.selector == "plain"], steps[steps.selector == "fixed:wide"]
    assert (plain.n_drafted == 0).all() and (plain.n_committed == 1).all() and plain.reward_bd.isna().all()
    assert set(plain.arm) == {"plain"} and set(fixed.arm) == {"wide"} and (fixed.n_drafted == 7).all()
    assert fixed.reward_bd.between(0, 1).all() and fixed.t_evaluate.eq(0).all()
    pool = steps[steps.selector.isin(SELECTORS)]
    assert set(pool.arm) == {"small", "short"} and pool.reward_be.eq(pool.n_accepted / 3).all()
    assert steps[steps.selector == "random"].propensity.eq(0.5).all()
    hedge = steps[steps.selector == "hedge"]
    assert hedge.losses.notna().any() and hedge.t_evaluate.gt(0).all()
    assert all(len(losses) == 2 for losses in hedge.losses.dropna())
    assert steps[steps.selector != "hedge"].losses.isna().all()


def test_a_drafter_outside_the_pool_may_have_a_longer_block(study) -> None:
    # `wide` drafts 7 tokens, the pool 3; its last block begins right before the limit.
    sequences, steps = study.run(pool=["short"], selectors={})
    wide = steps[steps.selector == "fixed:wide"]
    assert (wide.position == LIMIT - 2).any() and sequences.matches_plain.all()


def test_d49_a_finished_run_decodes_nothing_again(study) -> None:
    first = study.run()
    second = study.run()
    assert study.decoded == []
    for one, two in zip(first, second, strict=True):
        pd.testing.assert_frame_equal(one, two)


def test_adding_a_selector_decodes_it_and_plain(study) -> None:
    before, _ = study.run()
    sequences, steps = study.run("more", selectors={"random": {"kind": "random"}, "exp3": {"kind": "exp3"}})
    assert sorted(set(study.decoded)) == ["exp3:small,short", "plain:plain"]
    assert len(study.decoded) == 4 * 2
    assert len(sequences) == len(before) + 4 and not sequences.duplicated(KEY).any()
    assert not steps.duplicated([*KEY, "round"]).any()
    kept = sequences[~sequences.selector.isin(["exp3", "plain"])].reset_index(drop=True)
    old = before[before.selector != "plain"].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept.drop(columns="run_id"), old.drop(columns="run_id"))
    # The new method is compared with plain decoding measured beside it.
    new = sequences[sequences.selector == "exp3"].groupby("prompt_id").plain_wall_time.first()
    plain = sequences[sequences.selector == "plain"].set_index("prompt_id").wall_time
    pd.testing.assert_series_equal(new, plain.loc[new.index], check_names=False)


def test_taking_a_selector_away_decodes_nothing(study) -> None:
    study.run(selector_seeds=[0, 1])
    sequences, _ = study.run("less", selector_seeds=[1])
    assert study.decoded == []
    assert sequences[sequences.selector == "random"].selector_seed.tolist() == [1] * 4


@pytest.mark.parametrize("change", [{"max_new_tokens": LIMIT - 1}, {"temperature": 0.5}, {"stream_seed": 7}])
def test_another_configuration_is_decoded_afresh(change, study) -> None:
    small = {"selectors": {}, "warmup_prompts": 0, "prompts_per_domain": 1}
    study.run(**small)
    calls = []
    study.before_decode = lambda: calls.append(1)
    sequences, _ = study.run("other", **small, **change)
    assert len(calls) == len(sequences) > 0


def test_cells_of_other_code_are_decoded_again(study, monkeypatch) -> None:
    small = {"selectors": {}, "warmup_prompts": 0, "prompts_per_domain": 1}
    study.run(**small)
    monkeypatch.setattr(methods, "code_digest", lambda *modules: code_digest(*modules)[::-1])
    sequences, _ = study.run(**small)
    assert len(study.decoded) == 8 == len(sequences)


def test_d49_an_interrupted_run_leaves_no_output_and_continues(study) -> None:
    options = {"repeats": 3, "temperature": 1.0, "prompts_per_domain": 1, "warmup_prompts": 0}
    whole, whole_steps = study.run("whole", **options)
    calls = []

    def interrupt() -> None:
        calls.append(1)
        if len(calls) == 18:
            raise KeyboardInterrupt

    study.before_decode = interrupt
    # The configuration names the scratch folder: another seed of the stream leaves the first run's alone.
    options |= {"stream_seed": 2}
    with pytest.raises(KeyboardInterrupt):
        study.run(**options)
    assert not (study.folder / "out").exists()
    assert not [path for path in study.folder.rglob("*") if path.name.endswith(".part")]
    study.before_decode = lambda: None
    sequences, steps = study.run(**options)
    # Five methods; the fourth (prompt, repeat) was broken off and is decoded whole.
    assert len(sequences) == 30 and len(study.decoded) == 15
    assert not sequences.duplicated(KEY).any() and not steps.duplicated([*KEY, "round"]).any()
    columns = [*KEY, "sha256", "n_tokens", "rounds"]
    one, two = (table[columns].sort_values(KEY).reset_index(drop=True) for table in (sequences, whole))
    pd.testing.assert_frame_equal(one, two)
    columns = [
        *KEY,
        "round",
        "arm",
        "position",
        "n_drafted",
        "n_accepted",
        "n_committed",
        "propensity",
        "reward_bd",
    ]
    one, two = (
        table[columns].sort_values([*KEY, "round"]).reset_index(drop=True) for table in (steps, whole_steps)
    )
    pd.testing.assert_frame_equal(one, two)


def test_repeats_are_other_texts_and_the_same_for_every_selector(study) -> None:
    sequences, _ = study.run(repeats=2, temperature=1.0)
    assert (
        sequences.matches_plain.all()
        and sequences.groupby(["prompt_id", "repeat"]).sha256.nunique().eq(1).all()
    )
    assert sequences.groupby("prompt_id").sha256.nunique().eq(2).all()
    model, answers = reference_of(study.world.target), _answers(study.world)
    row = sequences[sequences["repeat"] == 1].iloc[0]
    text = naive_text(model, list(answers.prompt_ids[row.prompt_id]), LIMIT, 1.0, 1, row.prompt_id)
    assert row.sha256 == sha256_of_ids(text[: text.index(2) + 1] if 2 in text else text)


def test_a_float32_text_that_differs_stops_the_stage(study, monkeypatch) -> None:
    decode = live.decode

    def wrong(target, start, arms, selector, *rest, **options):
        result = decode(target, start, arms, selector, *rest, **options)
        return Result([*result.tokens[:-1], -1], result.rounds, 0.1) if selector.kind == "random" else result

    monkeypatch.setattr(live, "decode", wrong)
    with pytest.raises(DraftpoolError, match="4 float32 texts differ from plain decoding, first random on"):
        study.run()
    assert not (study.folder / "out").exists()


def test_d02_d08_a_bfloat16_text_that_differs_is_kept_and_flagged(study, monkeypatch) -> None:
    decode = live.decode

    def wrong(target, start, arms, selector, *rest, **options):
        result = decode(target, start, arms, selector, *rest, **options)
        if selector.kind == "random" and len(result.tokens) > 3:
            result.tokens[3] = -1
        return result

    monkeypatch.setattr(live, "decode", wrong)
    sequences, _ = study.run(dtype="bfloat16")
    flagged = sequences[(sequences.selector == "random") & (sequences.plain_n_tokens > 3)]
    assert (
        len(flagged) >= 2
        and not flagged.matches_plain.any()
        and (flagged.sha256 != flagged.plain_sha256).all()
    )
    assert flagged.first_mismatch.le(3).all() and flagged.top2_margin.ge(0).all()
    assert (
        set(sequences.dtype) == {"bfloat16"} and sequences[sequences.matches_plain].top2_margin.isna().all()
    )
    assert sequences[sequences.selector == "plain"].matches_plain.all()


def test_without_the_gate_nothing_is_decoded(study) -> None:
    (study.folder / "lossless.json").unlink()
    with pytest.raises(DraftpoolError, match="lossless.json.*file not found"):
        study.run()
    assert study.decoded == []


def test_prompts_beyond_the_positions_are_one_clear_error(study) -> None:
    with pytest.raises(DraftpoolError, match=f"positions, has {MAX_POSITIONS}|longer than the cache"):
        study.run(max_new_tokens=MAX_POSITIONS, selectors={})
    assert math.isfinite(load(study.world.target, TAPS).eps) and not (study.folder / "out").exists()
