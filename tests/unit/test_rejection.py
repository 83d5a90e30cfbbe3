"""The rule `rejection`: its law by exact enumeration and by many draws, its draws, and the stage that decodes with it.

The law of whole texts of the decoding loop is in `test_rejection_live.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from scripted import Scripted, run
from tiny import live_cfg, load, random_drafter, token_ids

from draftpool.analysis.live import mismatches, read_decodes
from draftpool.analysis.sessions import join_turns
from draftpool.artefacts import read_table, write_json
from draftpool.decoding import live
from draftpool.decoding.engine import Result, decode
from draftpool.decoding.rejection import (
    Rejection,
    check_sampling,
    distribution,
    keep_probability,
    one_hot,
    reject,
    residual,
    sample,
    sample_rows,
)
from draftpool.decoding.sequence import Sampling, prefill
from draftpool.drafters.base import Draft, most_likely
from draftpool.errors import DraftpoolError
from draftpool.selectors.base import Selector, make_selector

VOCABULARY = 4


def laws(seed: int, vocabulary: int, temperature: float, top_p: float) -> dict:
    """A Markov model of order 1: a distribution per last token, warped."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 1.5, (vocabulary, vocabulary)))
    return {token: distribution(logits[token], temperature, top_p) for token in range(vocabulary)}


def committed_law(p: dict, q: dict, anchor: int, k: int, greedy: bool) -> dict[tuple[int, ...], float]:
    """Law of what one round writes, by enumeration of drafts and rejections from the rule's own factors."""
    vocabulary = len(p)
    law: dict[tuple[int, ...], float] = {}
    for draft in product(range(vocabulary), repeat=k):
        chance, before, proposals = 1.0, anchor, []
        for token in draft:
            own = one_hot(q[before].argmax()[None], vocabulary)[0] if greedy else q[before]
            proposals.append(own)
            chance *= float(own[token])
            before = token
        if chance == 0.0:
            continue
        before, alive = anchor, chance
        for place, token in enumerate(draft):
            keep = float(keep_probability(p[before], proposals[place])[token])
            rest = residual(p[before], proposals[place])
            for last in range(vocabulary):
                text = (*draft[:place], last)
                law[text] = law.get(text, 0.0) + alive * (1.0 - keep) * float(rest[last])
            alive *= keep
            before = token
        for last in range(vocabulary):
            law[(*draft, last)] = law.get((*draft, last), 0.0) + alive * float(p[before][last])
    return law


def continued(law: dict[tuple[int, ...], float], p: dict, n: int) -> dict[tuple[int, ...], float]:
    """Law of the first n tokens, if plain sampling goes on behind what was written."""
    found: dict[tuple[int, ...], float] = {}
    waiting = list(law.items())
    while waiting:
        text, chance = waiting.pop()
        if len(text) >= n:
            found[text[:n]] = found.get(text[:n], 0.0) + chance
        else:
            waiting += [((*text, token), chance * float(p[text[-1]][token])) for token in range(len(p))]
    return found


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "one-hot"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("vocabulary", "k"), [(2, 3), (4, 2), (6, 1)])
def test_the_law_of_a_round_is_the_target_s(vocabulary, k, temperature, top_p, greedy):
    for seed in range(4):
        p = laws(seed, vocabulary, temperature, top_p)
        q = laws(seed + 100, vocabulary, temperature, top_p)
        made = continued(committed_law(p, q, 0, k, greedy), p, k + 1)
        plain = continued({(token,): float(p[0][token]) for token in range(vocabulary)}, p, k + 1)
        texts = set(made) | set(plain)
        distance = 0.5 * sum(abs(made.get(text, 0.0) - plain.get(text, 0.0)) for text in texts)
        assert distance < 1e-12


def test_a_wrong_rule_has_another_law():
    """The test above would see it: keeping with probability p instead of min(1, p / q)."""
    p, q = laws(0, 4, 1.0, 1.0), laws(100, 4, 1.0, 1.0)
    wrong = {(t,): float(q[0][t] * p[0][t]) for t in range(4)}
    rejected = 1.0 - sum(wrong.values())
    rest = residual(p[0], q[0])
    law = {text: chance + rejected * float(rest[text[0]]) for text, chance in wrong.items()}
    assert sum(abs(law[(t,)] - float(p[0][t])) for t in range(4)) > 1e-3


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "one-hot"])
def test_many_draws_of_the_function_itself_follow_the_target(greedy):
    """200,000 rounds, chi-square on the first token and on the first two (a second round where one was written)."""
    rng = np.random.default_rng(0)
    p, q = laws(3, VOCABULARY, 2.0, 0.95), laws(103, VOCABULARY, 2.0, 0.95)
    rounds, k = 200_000, 2
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    uniforms = rng.random((rounds, 2 * k + 2))
    rows, drafts = torch.stack(list(q.values())), torch.zeros(rounds, k + 1, dtype=torch.long)
    for place in range(k):
        own = rows[drafts[:, place]]
        column = torch.from_numpy(uniforms[:, place].copy())
        drafts[:, place + 1] = own.argmax(dim=-1) if greedy else sample_rows(own, column)
    tables: dict[tuple[int, ...], tuple] = {}
    for draft, row in zip(drafts[:, 1:].tolist(), uniforms, strict=True):
        key = tuple(draft)
        if key not in tables:
            befores = [0, *draft]
            own = [one_hot(q[b].argmax()[None], VOCABULARY)[0] if greedy else q[b] for b in befores[:-1]]
            tables[key] = torch.stack(own), torch.stack([p[b] for b in befores])
        kept = reject(draft, *tables[key], row[k : 2 * k + 1].tolist())
        text = kept.tokens if len(kept.tokens) > 1 else [*kept.tokens, sample(p[kept.tokens[0]], row[-1])]
        pairs[text[0], text[1]] += 1
    expected = np.array([[float(p[0][a] * p[a][b]) for b in range(VOCABULARY)] for a in range(VOCABULARY)])
    assert (pairs[expected == 0.0] == 0).all()
    there = expected > 0.0
    assert 6 <= there.sum() < VOCABULARY**2, "top-p cuts some, and leaves enough to compare"
    assert chisquare(pairs[there], rounds * expected[there] / expected[there].sum()).pvalue > 1e-3


@given(st.integers(0, 10**6), st.floats(0.05, 3.0), st.floats(0.01, 1.0))
@settings(deadline=None)
def test_top_p_keeps_the_smallest_set(seed, temperature, top_p):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, 6))
    p = distribution(logits, temperature, top_p)
    full = np.exp((logits / temperature).numpy() - (logits / temperature).numpy().max())
    full /= full.sum()
    order, kept, mass = np.argsort(-full, kind="stable"), [], 0.0
    for token in order:
        if mass >= top_p:
            break
        kept.append(token)
        mass += full[token]
    expected = np.zeros(6)
    expected[kept] = full[kept] / full[kept].sum()
    np.testing.assert_allclose(p.numpy(), expected, atol=1e-12)


def test_temperature_zero_is_the_argmax():
    p = distribution(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), 0.0, 0.5)
    assert p.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    kept = reject([1], one_hot(torch.tensor([1]), 3), p, [0.999, 0.3])
    assert kept.tokens == [1, 0] and kept.accepted == 1
    kept = reject([2], one_hot(torch.tensor([2]), 3), p, [0.0, 0.3])
    assert kept.tokens == [1] and kept.accepted == 0


def test_sampling_never_draws_what_has_no_probability():
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
    drawn = {sample(p, u) for u in (0.0, 0.1, 0.2499999, 0.25, 0.9, 1.0 - 1e-16)}
    assert drawn == {1, 3}


def test_rows_are_sampled_each_on_its_own():
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    uniforms = torch.tensor([0.5, 0.999, 0.3], dtype=torch.float64)
    assert sample_rows(p, uniforms).tolist() == [2, 1, 1]


def test_of_equally_likely_tokens_the_first_stays_in_the_top_p_set():
    p = distribution(torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]]), 1.0, 0.55)
    assert (p > 0).tolist() == [[False, True, False, True, False], [True, True, True, False, False]]


@pytest.mark.parametrize(
    ("temperature", "top_p", "message"),
    [
        (-0.1, 1.0, "temperature -0.1"),
        (float("nan"), 1.0, "temperature nan"),
        (1.0, 0.0, "top-p 0.0"),
        (1.0, 1.1, "top-p 1.1"),
    ],
)
def test_impossible_options_are_told(temperature, top_p, message):
    with pytest.raises(DraftpoolError, match=f"config key `decode`.*{message}"):
        check_sampling(temperature, top_p, "config key `decode`")


def test_a_draft_that_cannot_have_been_sampled_is_refused():
    q = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    with pytest.raises(DraftpoolError, match="token 0 in slot 0 has probability 0"):
        reject([0], q, torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64), [0.1, 0.1])


# --- in the decoding loop -------------------------------------------------------------------------------

K = 5
PROMPT = token_ids(9, seed=4)


def records(result: Result) -> pd.DataFrame:
    """Records of the rounds but for their times."""
    frame = pd.DataFrame(result.rounds)
    return frame[[name for name in frame if not name.startswith("t_")]]


@pytest.fixture
def pool(targets):
    """A target and two block drafters that are evaluated together, one of a reduced vocabulary."""
    target = load(targets.llama)
    arms = {
        "small": random_drafter(target, "small", vocabulary=torch.arange(5, 100)),
        "large": random_drafter(target, "large", seed=1),
    }
    return target, arms


class SlotBySlot:
    """Draws the tokens of a block drafter one after the other, as drafters do that read what they drew."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def draft(self, anchor: int, choose=most_likely) -> Draft:
        made = self.inner.draft(anchor)
        columns = [choose(row[None], slot) for slot, row in enumerate(made.log_q)]
        return replace(made, ids=made.vocabulary[torch.cat(columns)])


class Scheduled(Selector):
    """Plays the arms in turn; asks for full information if told to."""

    needs = "bandit"

    def start(self) -> None:
        pass

    def choose(self, t, available, draws):
        return np.array([t % self.n_arms]), np.ones(1)

    def learn(self, arms, feedback) -> None:
        pass


def play(pool, sampling: Sampling, needs: str = "bandit", extra: dict | None = None, **options) -> Result:
    target, arms = pool[0], pool[1] | (extra or {})
    prompt, chooser = PROMPT, Scheduled(list(arms))
    chooser.needs = needs
    start = prefill(target, prompt, sampling.max_new_tokens, K)
    return decode(target, start, arms, chooser, sampling, K, "p", **options)


@pytest.mark.parametrize("needs", ["bandit", "full"])
def test_at_temperature_zero_rejection_is_match(needs, pool) -> None:
    text = run(pool[0], PROMPT, {"plain": None}, limit=40, room=K).tokens
    results = []
    for verification in ("match", "rejection"):
        extra = {"scripted": Scripted("scripted", K, PROMPT, text, (2, K, 0, 1))}
        sampling = Sampling(40, (), 0.0, 0, 0.9, verification)
        results.append(play(pool, sampling, needs, extra))
    assert results[0].tokens == results[1].tokens == text
    pd.testing.assert_frame_equal(records(results[0]), records(results[1]))
    assert records(results[0]).n_accepted.max() == K


def test_an_arm_drafts_the_same_whether_it_is_played_or_evaluated(pool) -> None:
    sampling = Sampling(40, (), 1.0, 0, 0.9, "rejection")
    chain = {"chain": SlotBySlot(random_drafter(pool[0], "chain", seed=2)), "plain": None}
    bandit, full = (play(pool, sampling, needs, chain) for needs in ("bandit", "full"))
    assert bandit.tokens == full.tokens and bandit.rounds[0]["losses"] is None
    assert records(bandit).n_accepted.tolist() == records(full).n_accepted.tolist()
    assert records(bandit).n_accepted.sum() > 0
    # Losses tell how far the drafts that were drawn match the committed text.
    known = [row for row in full.rounds if row["losses"] is not None]
    for row in known:
        arm = ["small", "large", "chain", "plain"].index(row["arm"])
        assert row["losses"][arm] == pytest.approx(1.0 - (row["n_accepted"] + 1) / (K + 1))
    assert len(known) > 5


def test_texts_are_functions_of_their_seeds(pool) -> None:
    sampling = Sampling(30, (), 1.0, 2, 1.0, "rejection")
    texts = [play(pool, sampling, selector_seed=seed).tokens for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert play(pool, Sampling(30, (), 1.0, 3, 1.0, "rejection")).tokens != texts[0]
    # What plain decoding writes is keyed by the text alone.
    plain = ({"plain": None}, {"kind": "fixed", "arm": "plain"})
    own, start = [], prefill(pool[0], PROMPT, 30, K)
    for verification in ("match", "rejection"):
        options = Sampling(30, (), 1.0, 2, 0.9, verification)
        chooser = make_selector(plain[1], ["plain"])
        own.append(decode(pool[0], start, plain[0], chooser, options, K, "p").tokens)
    assert own[0] == own[1]


def test_every_draw_has_a_key_of_its_own() -> None:
    seen = []
    for seeds, prompt in (((0, 0), "p"), ((1, 0), "p"), ((0, 1), "p"), ((0, 0), "q")):
        made = Rejection(1.0, 1.0, *seeds, prompt)
        seen += [made.choose(arm, 3, round_).uniforms[0] for arm in "ab" for round_ in (0, 1)]
    assert len(set(seen)) == len(seen) == 16
    assert Rejection(1.0, 1.0, 0, 0, "p").choose("a", 3, 0).uniforms[0] == seen[0]


# --- the stage ------------------------------------------------------------------------------------------


def decode_stage(world, folder: Path, name: str, **changes) -> pd.DataFrame:
    """Sequences of decode_live into a folder of this name."""
    gate, out = folder / "lossless.json", folder / name
    write_json(gate, {})
    given = (world.target, world.prompts, world.drafters, gate, None, None, [])
    live.decode_live(live_cfg(world, **changes), *given, folder / "state" / name, out)
    return read_table(out / "sequences.parquet")


def test_texts_of_the_stage_are_not_compared_with_plain_decoding(llama_world, tmp_path):
    drawn = {"temperature": 1.0, "top_p": 0.9, "verification": "rejection", "stream": "drawn"}
    drawn |= {"prompts_per_domain": 1, "warmup_prompts": 0}
    sequences = decode_stage(llama_world, tmp_path, "one", **drawn)
    assert sequences[["matches_plain", "first_mismatch", "top2_margin"]].isna().all(axis=None)
    fixed = sequences[sequences["selector"] != "plain"]
    assert (fixed["sha256"] != fixed["plain_sha256"]).any()
    # One selector more: plain decoding alone is decoded once more, beside it, and draws the same.
    both = {"random": {"kind": "random"}, "hedge": {"kind": "hedgespec"}}
    more = decode_stage(llama_world, tmp_path, "two", **drawn, selectors=both)
    key = ["selector", "prompt_id", "sha256", "rounds"]
    same = more[more["selector"] != "hedge"]
    assert set(map(tuple, same[key].to_numpy())) == set(map(tuple, sequences[key].to_numpy()))
    # The statistics read such streams beside others, and find no text that should have matched.
    decode_stage(llama_world, tmp_path, "greedy", prompts_per_domain=1, warmup_prompts=0)
    steps, tables = read_decodes([tmp_path / "two", tmp_path / "greedy"])
    assert steps.loc[steps["stream"] == "drawn", "n_accepted"].sum() > 0
    assert (mismatches(join_turns(steps, tables)[1])["mismatches"] == 0).all()


def test_greedy_texts_stay_strict_under_rejection(llama_world, tmp_path, monkeypatch):
    plain = live.decode

    def wrong(target, start, arms, selector, *rest, **options):
        result = plain(target, start, arms, selector, *rest, **options)
        return replace(result, tokens=[-1]) if selector.kind == "random" else result

    monkeypatch.setattr(live, "decode", wrong)
    with pytest.raises(DraftpoolError, match="float32 texts differ from plain decoding, first random on"):
        decode_stage(llama_world, tmp_path, "out", verification="rejection", prompts_per_domain=1)
    assert not (tmp_path / "out").exists()
