"""Prompt lookup against a search of the whole text."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import run
from tiny import load, token_ids

from draftpool.drafters.ngram import NgramDrafter


def _searched(text: list[int], k: int, max_ngram: int) -> list[int]:
    """Longest n-gram first, latest occurrence first, by trying every place."""
    for n in range(max_ngram, 0, -1):
        wanted = text[-n:]
        if len(wanted) < n:
            continue
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == wanted:
                return text[end : end + k]
    return []


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    k=st.integers(1, 5),
    max_ngram=st.integers(1, 4),
)
def test_lookup_equals_a_search_of_the_whole_text(text, cuts, k, max_ngram):
    drafter = NgramDrafter("ngram", k, max_ngram)
    drafter.prefill(torch.tensor([], dtype=torch.long), torch.zeros(0, 1))
    places = sorted({0, len(text) - 1, *(cut for cut in cuts if cut < len(text))})
    for start, end in zip(places, places[1:], strict=False):
        drafter.catch_up(torch.tensor(text[start:end]), torch.zeros(end - start, 1))
    draft = drafter.draft(text[-1])
    assert draft.ids.tolist() == _searched(text, k, max_ngram)
    assert draft.log_q is None and len(draft.ids) <= k
    assert (drafter.state_bytes() > 0) == (len(text) > 1)


def test_lookup_is_lossless_and_accepts_in_a_loop(targets):
    target = load(targets.llama)
    prompt = token_ids(6) * 4
    plain = run(target, prompt, {"plain": None}, limit=60)
    looked_up = run(target, prompt, {"ngram": NgramDrafter("ngram", 5)}, limit=60)
    assert looked_up.tokens == plain.tokens
    assert sum(row["n_drafted"] for row in looked_up.rounds) > 0
    # A greedy model of a few layers ends in a loop, which a lookup finds.
    assert sum(row["n_accepted"] for row in looked_up.rounds) > 0 and len(looked_up.rounds) < len(
        plain.rounds
    )
