"""Law tests of `rejection`: the text's law is the target's, by exact enumeration and by many draws."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from draftpool.decoding.rejection import (
    check_sampling,
    distribution,
    keep_probability,
    one_hot,
    reject,
    residual,
    sample,
)
from draftpool.errors import DraftpoolError

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
    tables: dict[tuple[int, ...], tuple] = {}
    for row in uniforms:
        draft, before = [], 0
        for place in range(k):
            token = int(q[before].argmax()) if greedy else sample(q[before], row[place])
            draft.append(token)
            before = token
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
