"""Every kind of drafter: its text is plain decoding's, its state is that of the committed text, idle or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drafter_kinds import KINDS, MODELLED, K, eagle, early_exit, fresh, independent, make, published
from scripted import naive_text, run
from tiny import MAX_POSITIONS, TAPS, VOCABULARY, causal_model, load, reference_of, token_ids

from draftpool.drafters.base import Draft
from draftpool.drafters.language_model import LanguageModelDrafter
from draftpool.drafters.load import draft_everywhere
from draftpool.drafters.ngram import NgramDrafter

LIMIT = 24


@pytest.fixture(scope="module")
def world(targets):
    """Target, a prompt that repeats itself, and the naive continuation of both families."""
    made = {}
    for family in ("llama", "qwen3"):
        folder = getattr(targets, family)
        target, reference = load(folder, TAPS), reference_of(folder)
        prompt = token_ids(6, 3) * 2
        made[family] = target, prompt, naive_text(reference, prompt, LIMIT + K + 1, 0.0, 3, "p")
    return made


class Steered:
    """A real drafter whose proposals are replaced by the text's own for as many slots as the script says."""

    def __init__(self, inner, prompt: list[int], text: list[int], script: tuple[int, ...]):
        self.inner, self.name, self.k, self.modelled = inner, inner.name, inner.k, inner.modelled
        self.reset, self.fits, self.state_bytes = inner.reset, inner.fits, inner.state_bytes
        self.prompt, self.text, self.script, self.calls, self.fed = prompt, text, script, 0, 0

    def prefill(self, prompt, taps):
        self.fed = len(prompt)
        self.inner.prefill(prompt, taps)

    def catch_up(self, tokens, taps):
        self.fed += len(tokens)
        self.inner.catch_up(tokens, taps)

    def draft(self, anchor, choose=None):
        place = self.fed - len(self.prompt) + 1
        right = self.script[self.calls % len(self.script)]
        self.calls += 1
        wanted = (self.text + [0] * self.k)[place : place + self.k]
        if right < self.k:
            wanted[right] = (wanted[right] + 1) % VOCABULARY
        columns = None if not self.modelled else self.inner_vocabulary().tolist()

        def steer(log_q, first_slot):
            slots = range(first_slot, first_slot + len(log_q))
            return torch.tensor([columns.index(wanted[s]) if wanted[s] in columns else 0 for s in slots])

        made = self.inner.draft(anchor, steer)
        return made if self.modelled else Draft(torch.tensor(wanted), None, None)

    def inner_vocabulary(self):
        return self.inner.model.vocabulary if hasattr(self.inner, "model") else self.inner.vocabulary


def whole(kind: str, target):
    """A drafter that may propose every token."""
    if kind == "independent":
        return independent(target, vocabulary=torch.arange(VOCABULARY))
    return make(kind, target)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", [(0,), (1,), (K - 1,), (K,), (0, K, 1, K - 1, 2)])
def test_d11_text_is_plain_decoding_for_every_accept_length(kind, script, world) -> None:
    """After each rollback the next logits are right, or the text would not be; the drafter's cache rolls back too."""
    target, prompt, text = world["llama"]
    arm = Steered(whole(kind, target), prompt, text, script)
    result = run(target, prompt, {"a": arm}, limit=LIMIT)
    assert result.tokens == text[:LIMIT]
    # `published` cannot say the last ids of the vocabulary.
    if kind != "published":
        lengths = {row["n_accepted"] for row in result.rounds[:-1]}
        assert lengths <= set(script) and len(lengths) == len(set(script[: len(result.rounds) - 1]))
    # The drafter's state is that of the committed text: what it drafts next is what a fresh one drafts.
    place = arm.fed
    sequence = prompt + text
    following = arm.inner.draft(sequence[place])
    again = fresh(whole(kind, target), target, sequence[: place + 1])
    assert following.ids.tolist() == again.ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_d12_d13_text_ends_at_every_place_of_a_block(kind, world) -> None:
    target, prompt, text = world["llama"]
    for place in range(1, LIMIT):
        end = text[place]
        if end in text[:place]:
            continue
        arm = Steered(whole(kind, target), prompt, text, (K, 1, 0))
        result = run(target, prompt, {"a": arm}, limit=LIMIT, ends=(end,))
        assert result.tokens == text[: place + 1]
        assert sum(row["n_committed"] for row in result.rounds) == place
        assert result.rounds[-1]["hit_eos"] and not any(row["hit_eos"] for row in result.rounds[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_d14_exactly_as_many_tokens_as_asked_for(kind, world) -> None:
    target, prompt, text = world["llama"]
    for limit in range(2, 12):
        arm = Steered(whole(kind, target), prompt, text, (K,))
        result = run(target, prompt, {"a": arm}, limit=limit)
        assert result.tokens == text[:limit] and result.rounds[-1]["hit_limit"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_d18_drafts_after_partial_acceptance_are_those_of_a_fresh_context(kind, family, world) -> None:
    target, prompt, text = world[family]
    drafter, other = make(kind, target), make(kind, target)
    sequence, read = prompt + text, len(prompt)
    ids = torch.tensor(sequence)
    taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
    drafter.reset(len(sequence))
    drafter.prefill(ids[:read], taps[:read])
    for committed in (1, 3, K + 1, 2, 1, K):
        made = drafter.draft(sequence[read])
        expected = fresh(other, target, sequence[: read + 1])
        assert made.ids.tolist() == expected.ids.tolist()
        if made.log_q is not None:
            torch.testing.assert_close(made.log_q, expected.log_q, atol=1e-3, rtol=1e-3)
        drafter.catch_up(ids[read : read + committed], taps[read : read + committed])
        read += committed


@pytest.mark.parametrize("kind", KINDS)
def test_d19_after_idling_twenty_rounds_a_drafter_drafts_what_a_busy_one_does(kind, world, targets) -> None:
    target, prompt, _ = world["llama"]
    text = naive_text(reference_of(targets.llama), prompt, 40, 0.0, 3, "p")
    sequence = prompt + text
    ids = torch.tensor(sequence)
    taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
    idle, busy = make(kind, target), make(kind, target)
    start = len(prompt)
    for one in (idle, busy):
        one.reset(len(sequence))
        one.prefill(ids[:start], taps[:start])
        one.draft(sequence[start])
    for place in range(start, start + 20):
        busy.catch_up(ids[place : place + 1], taps[place : place + 1])
        busy.draft(sequence[place + 1])
    idle.catch_up(ids[start : start + 20], taps[start : start + 20])
    anchor = sequence[start + 20]
    left, right = idle.draft(anchor), busy.draft(anchor)
    assert left.ids.tolist() == right.ids.tolist()
    if left.log_q is not None:
        torch.testing.assert_close(left.log_q, right.log_q, atol=1e-3, rtol=1e-3)


def test_d19_pools_of_all_kinds_in_turn_write_the_plain_text(world) -> None:
    for target, prompt, text in world.values():
        arms = {kind: make(kind, target) for kind in KINDS} | {"plain": None}
        for selector in ({"kind": "round_robin"}, {"kind": "random"}, {"kind": "hedgespec"}):
            result = run(target, prompt, arms, selector, limit=LIMIT, hard=True)
            assert result.tokens == text[:LIMIT]
        # Evaluations hold the same drafts as drafting does.
        assert {row["arm"] for row in result.rounds} <= set(arms)


def test_d19_catching_up_is_charged_to_the_switch(world, monkeypatch) -> None:
    import time

    target, prompt, _ = world["llama"]
    for kind in KINDS:
        slow, other = make(kind, target), make("ngram", target)
        read = slow.catch_up

        def waiting(tokens, taps, read=read):
            time.sleep(0.004 * len(tokens))
            read(tokens, taps)

        monkeypatch.setattr(slow, "catch_up", waiting)
        arms = {"other": other, "slow": slow}
        result = run(target, prompt, arms, {"kind": "round_robin"}, limit=LIMIT)
        switched = [row for row in result.rounds[1:] if row["arm"] == "slow"]
        assert switched and all(row["t_switch"] >= 0.004 for row in switched)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_at_all_anchors_are_those_of_one_after_the_other(kind, world) -> None:
    for target, prompt, text in world.values():
        drafter, answer = make(kind, target), text[:LIMIT]
        ids = torch.tensor(prompt + answer[:-1])
        taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
        drafter.reset(len(ids) + 1)
        made = draft_everywhere(drafter, prompt, answer, taps)
        assert made.ids.shape == (LIMIT - 1, K)
        for place in range(LIMIT - 1):
            one = fresh(make(kind, target), target, prompt + answer[: place + 1])
            count = int(made.drafted[place])
            assert one.ids.tolist() == made.ids[place, :count].tolist()
            if one.log_q is not None:
                torch.testing.assert_close(one.log_q, made.log_q[place], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", MODELLED)
def test_what_is_drafted_is_what_was_chosen(kind, world) -> None:
    """`choose` decides every slot, and later slots stand on it (D-5: q is what was sampled from)."""
    target, prompt, text = world["llama"]
    ids = torch.tensor(prompt)
    taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
    drafter = make(kind, target)
    drafter.reset(len(prompt) + K)
    drafter.prefill(ids, taps)
    second = lambda log_q, slot: log_q.topk(2, dim=-1).indices[:, 1]  # noqa: E731
    made, greedy = drafter.draft(text[0], second), drafter.draft(text[0])
    columns = made.log_q.topk(2, dim=-1).indices[:, 1]
    assert made.ids.tolist() == made.vocabulary[columns].tolist() != greedy.ids.tolist()
    # The first slot's distribution does not depend on the choice.
    torch.testing.assert_close(made.log_q[0], greedy.log_q[0])


@pytest.mark.parametrize("kind", ["block", "eagle", "independent", "published", "early_exit"])
def test_a_drafter_with_too_few_positions_is_masked(kind, world) -> None:
    target, prompt, text = world["llama"]
    short = make(kind, target)
    assert short.fits(MAX_POSITIONS - K - 1) and not short.fits(MAX_POSITIONS)
    short.fits = lambda length: False
    for selector in ({"kind": "hedgespec"}, {"kind": "metasd_ucb", "reward": "be", "beta": 0.25}):
        arms = {"short": short, "eagle": eagle(target), "ngram": make("ngram", target)}
        result = run(target, prompt, arms, selector, limit=LIMIT, hard=True)
        assert result.tokens == text[:LIMIT] and {row["arm"] for row in result.rounds} <= {"eagle", "ngram"}
    # Alone it falls back to plain decoding.
    result = run(target, prompt, {"short": short}, limit=LIMIT)
    assert result.tokens == text[:LIMIT] and all(row["n_drafted"] == 0 for row in result.rounds)


def test_state_is_reported_and_grows_with_the_text(world) -> None:
    target, prompt, text = world["llama"]
    for kind in KINDS:
        drafter, sizes = make(kind, target), []
        for length in (len(prompt), len(prompt) + 16):
            fresh(drafter, target, (prompt + text)[: length + 1])
            sizes.append(drafter.state_bytes())
        assert 0 < sizes[0] < sizes[1]
        own = sum(tensor.numel() for tensor in drafter.weights())
        assert (own > 0) == (kind not in ("ngram", "suffix", "early_exit"))


def test_a_language_model_drafter_writes_what_transformers_writes(targets) -> None:
    """Greedy drafts of the whole target's own layers are its own text."""
    target = load(targets.llama, TAPS)
    prompt = token_ids(9, 5)
    text = naive_text(reference_of(targets.llama), prompt, K + 1, 0.0, 3, "p")
    complete = independent(target, vocabulary=torch.arange(VOCABULARY), n_layers=len(target.layers))
    made = fresh(complete, target, [*prompt, text[0]])
    assert made.ids.tolist() == text[1 : K + 1]
    other = published(target)
    reference = other.lm.model
    ids = [*prompt, text[0]]
    for token in fresh(other, target, ids).ids.tolist():
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, -1, : VOCABULARY - 7]
        assert token == int(logits.argmax())
        ids.append(token)


def test_early_exit_shares_the_weights_of_the_target(targets) -> None:
    target = load(targets.llama, TAPS)
    drafter = early_exit(target)
    assert drafter.lm.layers[0] is target.layers[0] and drafter.weights() == []
    assert np.prod(drafter.lm.head_weight.shape) == np.prod(target.head_weight.shape)


def test_texts_are_those_of_transformers_assisted_generation_and_prompt_lookup(targets, tmp_path) -> None:
    """Same models, greedy, float32, sixteen prompts."""
    target, reference = load(targets.llama, TAPS), reference_of(targets.llama)
    small = causal_model("llama", 5, num_hidden_layers=1)
    small.save_pretrained(tmp_path / "small")
    drafter = LanguageModelDrafter("small", load(tmp_path / "small", []), K, torch.arange(VOCABULARY))
    options = {"do_sample": False, "max_new_tokens": LIMIT, "pad_token_id": 0, "eos_token_id": [2]}
    drafted = 0
    for seed in range(16):
        prompt = token_ids(7, seed) * 2
        ids = torch.tensor([prompt])
        for arm, extra in (
            (drafter, {"assistant_model": small}),
            (NgramDrafter("ngram", K), {"prompt_lookup_num_tokens": K}),
        ):
            with torch.no_grad():
                theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), **options, **extra)
            ours = run(target, prompt, {"a": arm}, limit=LIMIT, ends=(2,))
            assert ours.tokens == theirs[0, len(prompt) :].tolist()
            drafted += sum(row["n_drafted"] for row in ours.rounds)
    assert drafted > 100
