"""The suffix drafter against a search of the whole text and of all past outputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import run
from tiny import load, token_ids

from draftpool.drafters.suffix import SuffixAutomaton, SuffixDrafter
from draftpool.errors import DraftpoolError

NO_TAPS = torch.zeros(0, 1)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def read(drafter: SuffixDrafter, text: list[int]) -> None:
    drafter.catch_up(torch.tensor(text, dtype=torch.long), NO_TAPS)


def longest(text: list[int], ended_by: list[int]) -> tuple[int, int]:
    """Length of the longest suffix of `ended_by` that occurs in `text`, and where its latest occurrence ends."""
    for n in range(len(ended_by), 0, -1):
        for end in range(len(text), n - 1, -1):
            if text[end - n : end] == ended_by[-n:]:
                return n, end
    return 0, 0


def searched(outputs: list[list[int]], text: list[int], anchor: int, k: int) -> list[int]:
    """The same by trying every place: own text first, then the latest of the outputs."""
    whole = [*text, anchor]
    own, end = longest(text, whole)
    best, found = own, whole[end : end + k] if own else []
    for output in reversed(outputs):
        n, end = longest(output, whole)
        if n > best:
            best, found = n, output[end : end + k]
    return found


@given(text=st.lists(st.integers(0, 3), max_size=40))
def test_the_automaton_knows_every_substring_and_its_latest_end(text):
    made = SuffixAutomaton()
    for token in text:
        made.extend(token)
    assert made.states <= max(1, 2 * len(text))
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            state, length = 0, 0
            for token in text[start:end]:
                state, length = made.follow(state, length, token)
            latest = max(
                e for e in range(end - start, len(text) + 1) if text[e - (end - start) : e] == text[start:end]
            )
            assert length == end - start and made.end[state] == latest - 1
    assert made.follow(0, 0, 9) == (0, 0)


@given(outputs=st.lists(tokens, max_size=4), text=tokens, anchor=st.integers(0, 2), k=st.integers(1, 5))
def test_drafts_equal_a_search_of_text_and_outputs(outputs, text, anchor, k):
    drafter = SuffixDrafter("suffix", k, store_tokens=1000)
    for output in outputs:
        drafter.remember(output)
    drafter.prefill(torch.tensor(text[:3], dtype=torch.long), NO_TAPS)
    read(drafter, text[3:])
    draft = drafter.draft(anchor)
    assert draft.ids.tolist() == searched(outputs, text, anchor, k)
    assert draft.log_q is None and draft.vocabulary is None
    # Drafting changes nothing.
    assert drafter.draft(anchor).ids.tolist() == draft.ids.tolist()


@given(outputs=st.lists(tokens, min_size=1, max_size=6), text=tokens, bound=st.integers(1, 30))
def test_the_oldest_outputs_are_forgotten_and_the_rest_is_as_if_they_had_never_been(outputs, text, bound):
    drafter = SuffixDrafter("suffix", 4, bound)
    for output in outputs:
        drafter.remember(output)
    kept: list[list[int]] = []
    for output in reversed(outputs):
        if sum(map(len, kept)) + len(output[-bound:]) > bound:
            break
        kept.insert(0, output[-bound:])
    assert list(drafter.memory.outputs) == kept and sum(map(len, kept)) <= bound
    fresh = SuffixDrafter("fresh", 4, 1000)
    for output in kept:
        fresh.remember(output)
    for one in (drafter, fresh):
        one.prefill(torch.tensor(text, dtype=torch.long), NO_TAPS)
    assert drafter.draft(1).ids.tolist() == fresh.draft(1).ids.tolist()
    assert drafter.state_bytes() == fresh.state_bytes()


def test_a_stream_begins_with_an_empty_store():
    drafter = SuffixDrafter("suffix", 3)
    drafter.remember([5, 6, 7, 8])
    read(drafter, [5])
    assert drafter.draft(6).ids.tolist() == [7, 8]
    drafter.memory = drafter.new_memory()
    drafter.reset(0)
    read(drafter, [5])
    assert drafter.draft(6).ids.tolist() == [] and drafter.state_bytes() > 0


def test_no_match_crosses_the_border_of_two_outputs():
    drafter = SuffixDrafter("suffix", 5)
    drafter.remember([1, 2])
    drafter.remember([3, 4])
    assert drafter.draft(1).ids.tolist() == [2]
    read(drafter, [2])
    assert drafter.draft(3).ids.tolist() == [4]


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(DraftpoolError, match="drafter `s`.*k = 0"):
        SuffixDrafter("s", 0)
    with pytest.raises(DraftpoolError, match="store of -1 tokens"):
        SuffixDrafter("s", 3, -1)


def test_the_text_is_that_of_plain_decoding(targets):
    target = load(targets.llama, [0, 1])
    prompt = token_ids(7, 1) * 2
    plain = run(target, prompt, {"plain": None}, limit=24)
    drafter = SuffixDrafter("suffix", 4)
    drafter.remember(plain.tokens)
    made = run(target, prompt, {"suffix": drafter}, limit=24)
    assert made.tokens == plain.tokens
    # The store holds this very answer, so it is drafted in long blocks.
    assert len(made.rounds) < len(plain.rounds) / 2
