"""Verification: `match` by enumeration, the law of the target's choices, and acceptance probabilities."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tiny import load, token_ids

from draftpool import draws
from draftpool.config.load import merge, read_yaml, resolve
from draftpool.config.plan import Plan
from draftpool.data.generation import Text, answer_prompts
from draftpool.decoding import verification
from draftpool.decoding.engine import decode
from draftpool.decoding.rejection import distribution
from draftpool.decoding.sequence import Sampling, prefill
from draftpool.decoding.verification import acceptance_probability, gumbel_noise, match, target_choices
from draftpool.errors import DraftpoolError
from draftpool.selectors.base import make_selector

EOS = 2
N_DRAWS = 40_000
LOGITS = [1.2, -0.3, 0.4, 2.0, -1.5]
TEMPERATURE = 0.7


def _naive(draft: list[int], choices: list[int], limit: int) -> tuple[list[int], int, bool]:
    """Token by token: the target's token is kept; go on while the draft guessed it and the text goes on."""
    tokens, accepted = [], 0
    for place, choice in enumerate(choices):
        tokens.append(choice)
        right = place < len(draft) and draft[place] == choice
        accepted += right
        if choice == EOS:
            return tokens, accepted, True
        if len(tokens) == limit or not right:
            break
    return tokens, accepted, False


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_d12_match_equals_a_walk_token_by_token(k) -> None:
    ends_at = set()
    for draft in itertools.product(range(3), repeat=k):
        for choices in itertools.product(range(3), repeat=k + 1):
            for limit in range(1, k + 3):
                verdict = match(list(draft), list(choices), limit, {EOS})
                tokens, accepted, ended = _naive(draft, choices, limit)
                prefix = next((i for i in range(k) if draft[i] != choices[i]), k)
                assert (verdict.tokens, verdict.accepted, verdict.hit_eos) == (tokens, accepted, ended)
                assert verdict.hit_limit == (len(tokens) == limit) and verdict.matched == prefix
                shown = list(choices[: prefix + 1])
                assert verdict.left == min(limit, shown.index(EOS) + 1 if EOS in shown else limit)
                assert len(tokens) == min(accepted + 1, verdict.left)
                if ended:
                    ends_at.add((len(tokens) - 1, accepted == len(tokens)))
    # At every place of the block as an accepted token and as the target's own one (bonus: place k).
    assert ends_at == {(i, True) for i in range(k)} | {(i, False) for i in range(k + 1)}


def test_d13_an_accepted_end_contributes_what_stands_before_it() -> None:
    draft = [5, 6, EOS, 7, 8]
    verdict = match(draft, [*draft, 9], 100, {EOS})
    assert verdict.tokens == [5, 6, EOS] and verdict.accepted == verdict.left == 3
    assert verdict.hit_eos and not verdict.hit_limit and verdict.matched == 5


def test_d14_the_limit_is_never_overshot() -> None:
    draft = list(range(10, 25))
    verdict = match(draft, [*draft, 30], 10, {EOS})
    assert verdict.tokens == draft[:10] and verdict.accepted == verdict.left == 10
    assert verdict.hit_limit and not verdict.hit_eos


def test_plain_decoding_is_an_empty_draft() -> None:
    verdict = match([], [4], 9, {EOS})
    assert (verdict.tokens, verdict.accepted, verdict.matched, verdict.left) == ([4], 0, 0, 9)


def test_any_of_several_ids_ends_a_text() -> None:
    assert match([1, 7, 3], [1, 7, 3, 4], 9, [7, 3]).tokens == [1, 7]


# --- the target's choices -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled() -> np.ndarray:
    """Choices at many positions of one text whose logits are always the same."""
    logits = torch.tensor([LOGITS]).expand(N_DRAWS, -1)
    return target_choices(logits, TEMPERATURE, 11, "prompt", 0).numpy()


def _law(logits=LOGITS, temperature: float = TEMPERATURE) -> np.ndarray:
    weights = np.exp(np.array(logits) / temperature)
    return weights / weights.sum()


def test_d05_choices_follow_the_softmax_at_their_temperature(sampled) -> None:
    counts = np.bincount(sampled, minlength=5)
    assert chisquare(counts, _law() * N_DRAWS).pvalue > 1e-3
    # The test has the power to see a wrong temperature.
    assert chisquare(counts, _law(temperature=TEMPERATURE * 1.1) * N_DRAWS).pvalue < 1e-6
    # Consecutive positions are independent.
    pairs = np.bincount(sampled[:-1:2] * 5 + sampled[1::2], minlength=25)
    assert chisquare(pairs, np.outer(_law(), _law()).ravel() * (N_DRAWS // 2)).pvalue > 1e-3


def test_d05_argmax_of_logits_and_noise_follows_the_softmax_on_200_000_draws() -> None:
    # The noise of one position serves forty vocabularies of five.
    noise = (
        torch.stack([gumbel_noise(200, 0, "p", position) for position in range(5_000)]).reshape(-1, 5).numpy()
    )
    choices = (np.array(LOGITS) / TEMPERATURE + noise).argmax(axis=1)
    counts = np.bincount(choices, minlength=5)
    assert counts.sum() == 200_000 and chisquare(counts, _law() * 200_000).pvalue > 1e-3
    assert chisquare(counts, _law(temperature=TEMPERATURE * 1.05) * 200_000).pvalue < 1e-6


def test_d06_an_argmax_draft_is_accepted_with_the_target_s_probability(sampled) -> None:
    law = _law()
    for guess in range(5):
        accepted = rejected = 0
        others = np.zeros(5)
        for choice in sampled[:20_000].tolist():
            verdict = match([guess], [choice, 0], 9, ())
            accepted += verdict.accepted
            if not verdict.accepted:
                rejected += 1
                others[verdict.tokens[0]] += 1
        assert chisquare([accepted, rejected], np.array([law[guess], 1 - law[guess]]) * 20_000).pvalue > 1e-3
        # A rejected guess is replaced by a draw from the target without it.
        assert others[guess] == 0
        rest = np.delete(law, guess) / (1 - law[guess])
        assert chisquare(np.delete(others, guess), rest * rejected).pvalue > 1e-3


TABLE = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 5)) * 1.5)


def _speculate(drafter, seed: int, limit: int, temperature: float) -> list[int]:
    """A text of a toy target whose logits depend on the last token, in blocks of three guesses."""
    tokens = [0]
    while len(tokens) <= limit:
        draft = drafter(tokens)
        rows = TABLE[[tokens[-1], *draft]]
        choices = target_choices(rows, temperature, seed, "p", len(tokens)).tolist()
        tokens += match(draft, choices, limit + 1 - len(tokens), ()).tokens
    return tokens[1:]


def test_d05_the_text_is_the_same_whatever_is_drafted() -> None:
    generator = np.random.default_rng(1)

    def likely(tokens: list[int]) -> list[int]:
        guess = [tokens[-1]]
        for _ in range(3):
            guess.append(int(TABLE[guess[-1]].argmax()))
        return guess[1:]

    drafters = [
        likely,
        lambda _: [0, 0, 0],
        lambda _: generator.integers(0, 5, size=3).tolist(),
        lambda _: [4],
    ]
    texts = set()
    for seed in range(25):
        plain = _speculate(lambda _: [], seed, 12, 1.0)
        texts.add(tuple(plain))
        for drafter in drafters:
            assert _speculate(drafter, seed, 12, 1.0) == plain
    assert len(texts) == 25


def test_d05_two_token_texts_follow_the_product_law_while_speculating() -> None:
    n = 3_000
    first, second = _law(TABLE[0].tolist(), 1.0), [_law(TABLE[token].tolist(), 1.0) for token in range(5)]
    law = np.array([first[i] * second[i][j] for i in range(5) for j in range(5)])
    guess = int(TABLE[0].argmax())
    counts = np.zeros(25)
    for seed in range(n):
        one, two = _speculate(lambda _: [guess, 3], seed, 2, 1.0)
        counts[one * 5 + two] += 1
    assert chisquare(counts, law * n).pvalue > 1e-3


def test_noise_is_keyed_by_seed_prompt_and_position_alone() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(6, 40)))
    whole = target_choices(logits, 1.0, 5, "p", 10)
    for start, stop in ((0, 1), (1, 4), (5, 6)):
        assert torch.equal(target_choices(logits[start:stop], 1.0, 5, "p", 10 + start), whole[start:stop])
    base = gumbel_noise(40, 5, "p", 10)
    for other in ((5, "p", 11), (6, "p", 10), (5, "q", 10)):
        assert not torch.equal(gumbel_noise(40, *other), base)
    noise = gumbel_noise(100_000, 0, "p", 0)
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(np.euler_gamma, abs=0.02)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_ties_go_to_the_first_index(dtype) -> None:
    logits = torch.zeros(3, 50_000, dtype=dtype)
    logits[0, [7, 9, 40_000]] = 1.0
    logits[1, [49_999, 20_001]] = 2.0
    assert target_choices(logits, 0.0, 0, "p", 0).tolist() == [7, 20_001, 0]


# --- top-p ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "top_p", "kept"), [(0.7, 0.9, 2), (1.0, 0.8, 2), (1.5, 0.9, 4)])
def test_d05_choices_follow_plain_top_p_sampling_on_200_000_draws(
    temperature, top_p, kept, monkeypatch
) -> None:
    n = 200_000
    noise = -torch.log(-torch.log(torch.from_numpy(draws.uniform((n, 5), "test of top-p")))).float()
    monkeypatch.setattr(verification, "gumbel_noise", lambda vocabulary, seed, prompt, place: noise[place])
    counts = np.bincount(
        target_choices(torch.tensor([LOGITS]).expand(n, -1), temperature, 0, "p", 0, top_p).numpy(),
        minlength=5,
    )
    law = np.zeros(5)
    likely = np.argsort(-_law(temperature=temperature))[:kept]
    law[likely] = _law(temperature=temperature)[likely]
    assert law.sum() >= top_p > law.sum() - law[likely[-1]]
    assert counts[law == 0].sum() == 0
    there = law > 0
    assert chisquare(counts[there], law[there] / law.sum() * n).pvalue > 1e-3
    np.testing.assert_allclose(
        distribution(torch.tensor(LOGITS), temperature, top_p), law / law.sum(), atol=1e-7
    )
    # The test has the power to see a slightly lower temperature.
    wrong = law**1.1
    assert chisquare(counts[there], wrong[there] / wrong.sum() * n).pvalue < 1e-6


def test_top_p_changes_nothing_where_it_cuts_nothing() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(20, 40)))
    whole = target_choices(logits, 1.0, 5, "p", 0)
    assert torch.equal(target_choices(logits, 1.0, 5, "p", 0, 1.0), whole)
    # With the noise of the same places, a choice inside the set stays what it was.
    cut = target_choices(logits, 1.0, 5, "p", 0, 0.7)
    inside = distribution(logits, 1.0, 0.7).gather(1, whole[:, None])[:, 0] > 0
    assert inside.any() and not inside.all() and torch.equal(cut[inside], whole[inside])
    assert torch.equal(target_choices(logits, 0.0, 5, "p", 0, 0.7), logits.argmax(dim=-1))
    with pytest.raises(DraftpoolError, match="top-p 0.0"):
        target_choices(logits, 1.0, 5, "p", 0, 0.0)


def test_answers_with_top_p_are_what_live_decoding_writes(targets) -> None:
    target, prompts = load(targets.llama), [token_ids(9, seed) for seed in (4, 5)]
    texts = [Text("a", 1), Text("b", 2)]
    for top_p in (0.6, 1.0):
        answers = dict(answer_prompts(target, prompts, [2], 20, 2, False, 1.0, texts, top_p))
        for place, text in enumerate(texts):
            sampling = Sampling(20, (2,), 1.0, text.sample, top_p)
            chooser = make_selector({"kind": "plain"}, ["plain"])
            start = prefill(target, prompts[place], 20, 1)
            live = decode(target, start, {"plain": None}, chooser, sampling, 1, text.prompt_id)
            assert answers[place].ids == live.tokens


TINY = read_yaml(Path(__file__).resolve().parents[1] / "workflow/config.yaml")


def plan_of(changes: dict) -> Plan:
    return Plan(resolve(merge(copy.deepcopy(TINY), changes)))


def test_top_p_is_told_to_every_stage_that_samples() -> None:
    stream = {"decode": {"top_p": 0.8, "streams": {"drawn": {"domains": ["drawn"]}}}}
    before, after = plan_of(stream), plan_of(stream | {"prompt_sets": {"drawn": {"top_p": 0.9}}})
    # What samples from everything is told as before there was a top-p, and keeps its id.
    assert "top_p" not in before.responses["drawn", "eval"].cfg
    assert after.responses["drawn", "eval"].cfg["top_p"] == 0.9
    for name, other in before.responses.items():
        assert (after.responses[name].id == other.id) == (name[0] != "drawn")
    told = {answers["name"]: answers["top_p"] for answers in after.score.cfg["answers"]}
    assert told.pop("drawn") == 0.9 and set(told.values()) == {1.0}
    # A sampled set is decoded as it was answered, whatever the other streams do.
    assert [plan.decodes["drawn", "float32"].cfg["top_p"] for plan in (before, after)] == [1.0, 0.9]
    assert after.decodes["mixed", "float32"].cfg["top_p"] == 0.8
    assert after.drafter("general-s0").id == plan_of({}).drafter("general-s0").id


def test_streams_drawn_under_rejection_are_not_replayed() -> None:
    stream = {"streams": {"drawn": {"domains": ["drawn"]}}}
    for rule, replayed in (("match", {"drawn", "mixed"}), ("rejection", {"mixed"})):
        plan = plan_of({"decode": stream | {"verification": rule}})
        assert plan.decodes["drawn", "float32"].cfg["verification"] == rule
        streams = plan.by_stage()["replay_selectors"].popitem()[1].cfg["streams"]
        assert set(streams) & {"drawn", "mixed"} == replayed


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"decode": {"temperature": -0.5}}, "decode.temperature"),
        ({"decode": {"top_p": 0.0}}, "decode.top_p"),
        ({"decode": {"top_p": 1.5}}, "decode.top_p"),
        ({"decode": {"verification": "sampling"}}, "decode.verification"),
        ({"prompt_sets": {"drawn": {"temperature": -1.0}}}, "prompt_sets.drawn.temperature"),
        ({"prompt_sets": {"drawn": {"top_p": 0.0}}}, "prompt_sets.drawn.top_p"),
    ],
)
def test_impossible_options_of_sampling_name_their_key(changes, key) -> None:
    with pytest.raises(DraftpoolError, match=f"^config key `{key}`: [^\n]*$"):
        plan_of(changes)


# --- acceptance probability -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_acceptance_probability_equals_a_loop(data) -> None:
    size = data.draw(st.integers(2, 7))
    reduced = data.draw(st.booleans())
    kept = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))) if reduced else list(range(size))
    n, numbers = data.draw(st.integers(1, 3)), np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = torch.from_numpy(numbers.normal(size=(n, size)) * 3)
    log_q = torch.from_numpy(numbers.normal(size=(n, len(kept))) * 3).log_softmax(-1)
    got = acceptance_probability(log_q, torch.tensor(kept) if reduced else None, logits)
    assert got.dtype == torch.float32 and got.shape == (n,)
    for row in range(n):
        p = np.exp(logits[row].numpy()) / np.exp(logits[row].numpy()).sum()
        q = np.zeros(size)
        for column, token in enumerate(kept):
            q[token] = np.exp(float(log_q[row, column]))
        assert float(got[row]) == pytest.approx(1.0 - 0.5 * np.abs(p - q).sum(), abs=1e-5)


def test_equal_laws_are_always_accepted_and_disjoint_ones_never() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert float(acceptance_probability(logits.log_softmax(-1), None, logits)) == pytest.approx(1.0)
    far = torch.tensor([[100.0, 0.0, 0.0]])
    assert float(acceptance_probability(torch.zeros(1, 1), torch.tensor([2]), far)) < 1e-30
