"""The decoding loop: its text is plain decoding's whatever is drafted, and its records add up."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted, Watched, fresh_draft, naive_text, run
from tiny import load, random_drafter, reference_of, token_ids

from draftpool.decoding import engine
from draftpool.decoding.feedback import PendingLosses, length_loss
from draftpool.decoding.sequence import Sampling, Sequence, prefill
from draftpool.decoding.verification import match
from draftpool.errors import DraftpoolError
from draftpool.selectors.base import Selector, make_selector

K = 5
LIMIT = 14
PROMPT = token_ids(9, seed=4)
SCRIPTS = [(0,), (1,), (K - 1,), (K,), (0, K, 1, K - 1, 2)]
CASES = [(family, temperature) for family in ("llama", "qwen3") for temperature in (0.0, 1.0)]


@cache
def _loaded(folder):
    return load(folder), reference_of(folder)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-T{case[1]:.0f}")
def case(request, targets):
    """Target, temperature, a prompt and its naive text, longer than any limit by a whole block."""
    family, temperature = request.param
    target, reference = _loaded(getattr(targets, family))
    for seed in range(20):
        prompt = token_ids(9, seed)
        text = naive_text(reference, prompt, LIMIT + K + 1, temperature, 3, "p")
        # Varied enough to end at nearly every place.
        if len(set(text[:LIMIT])) >= LIMIT - 2:
            return target, temperature, prompt, text
    raise AssertionError("no varied text")


@pytest.fixture
def llama(targets):
    target, reference = _loaded(targets.llama)
    return target, naive_text(reference, PROMPT, 60, 0.0, 3, "p")


def _check_rounds(result, drafter) -> None:
    """Every column of the step records, from the text and the script alone."""
    assert len(result.tokens) == 1 + sum(row["n_committed"] for row in result.rounds)
    position = 0
    for number, row in enumerate(result.rounds):
        left = len(result.tokens) - 1 - position
        right = drafter.script[number % len(drafter.script)]
        assert (row["round"], row["position"], row["n_drafted"]) == (number, position, drafter.k)
        assert row["n_accepted"] == min(right, left)
        assert row["n_committed"] == min(row["n_accepted"] + 1, left)
        assert row["reward_be"] == row["n_accepted"] / drafter.k
        if number < len(result.rounds) - 1:
            assert not row["hit_eos"] and not row["hit_limit"]
        position += row["n_committed"]
    assert result.seconds == pytest.approx(
        sum(v for row in result.rounds for k, v in row.items() if k[:2] == "t_")
    )


def test_d01_d07_text_is_plain_decoding_for_every_accept_length_and_limit(case) -> None:
    target, temperature, prompt, text = case
    drafted = accepted = 0
    lengths = set()
    for limit in (1, 2, 3, 6, 7, LIMIT):
        plain = run(target, prompt, {"plain": None}, limit=limit, temperature=temperature, room=K)
        assert plain.tokens == text[:limit]
        assert [row["n_committed"] for row in plain.rounds] == [1] * (limit - 1)
        for script in SCRIPTS:
            drafter = Scripted("d", K, prompt, text, script)
            result = run(target, prompt, {"d": drafter}, limit=limit, temperature=temperature)
            assert result.tokens == text[:limit]
            _check_rounds(result, drafter)
            if limit > 1:
                assert result.rounds[-1]["hit_limit"] and not result.rounds[-1]["hit_eos"]
            drafted += sum(row["n_drafted"] for row in result.rounds)
            accepted += sum(row["n_accepted"] for row in result.rounds)
            lengths |= {row["n_accepted"] for row in result.rounds}
    assert lengths >= {0, 1, K - 1, K}
    assert drafted > accepted > 0


def test_d12_text_ends_at_every_place_of_a_block(case) -> None:
    target, temperature, prompt, text = case
    places = set()
    for place in [place for place in range(1, LIMIT) if text[place] not in text[:place]]:
        for script in SCRIPTS:
            drafter = Scripted("d", K, prompt, text, script)
            result = run(
                target, prompt, {"d": drafter}, limit=LIMIT, ends={text[place]}, temperature=temperature
            )
            assert result.tokens == text[: place + 1]
            _check_rounds(result, drafter)
            last = result.rounds[-1]
            assert last["hit_eos"] and last["hit_limit"] == (place == LIMIT - 1)
            places.add((last["n_committed"] - 1, last["n_accepted"] == last["n_committed"]))
    # Accepted at block positions 0, middle and last, and as the target's own token behind an accepted block.
    assert places >= {(0, True), (2, True), (K - 1, True), (K, False)}


def test_d12_text_may_end_with_its_first_token(llama) -> None:
    target, text = llama
    drafter = Scripted("d", K, PROMPT, text, (K,))
    result = run(target, PROMPT, {"d": drafter}, ends={text[0]})
    assert result.tokens == text[:1] and result.rounds == [] and result.seconds == 0.0


def test_d14_limit_ten_with_a_block_of_sixteen(llama) -> None:
    target, text = llama
    result = run(target, PROMPT, {"d": Scripted("d", 15, PROMPT, text, (15,))}, limit=10)
    assert result.tokens == text[:10]
    assert [(row["n_accepted"], row["n_committed"], row["hit_limit"]) for row in result.rounds] == [
        (9, 9, True)
    ]


def test_drafters_are_fed_the_committed_tokens_and_their_taps(llama) -> None:
    target, text = llama
    arms = {name: Scripted(name, K, PROMPT, text, (1, 0, 4)) for name in ("a", "b")}
    run(target, PROMPT, arms, {"kind": "round_robin"}, limit=30)
    everything = PROMPT + text
    fresh = target.forward(torch.tensor([everything]), target.new_cache(len(everything))).taps[0]
    for drafter in arms.values():
        assert len(drafter.anchors) > 3
        assert drafter.fed == everything[: len(drafter.fed)]
        assert all(anchor == text[place] for place, anchor in drafter.anchors)
        taps = torch.cat(drafter.taps)
        torch.testing.assert_close(taps, fresh[: len(taps)], atol=1e-4, rtol=1e-4)


def test_one_prefill_serves_many_runs(llama) -> None:
    target, text = llama
    start = prefill(target, PROMPT, 20, K)
    for limit, script in ((20, (2,)), (7, (K,)), (20, (0,))):
        drafter = Scripted("d", K, PROMPT, text, script)
        chooser = make_selector({"kind": "fixed", "arm": "d"}, ["d"])
        result = engine.decode(target, start, {"d": drafter}, chooser, Sampling(limit, ()), K, "p")
        assert result.tokens == text[:limit]


def test_margins_belong_to_the_committed_tokens(llama) -> None:
    target, text = llama
    result = run(target, PROMPT, {"d": Scripted("d", K, PROMPT, text, (3, 0))}, limit=13, keep_margins=True)
    ids = torch.tensor([PROMPT + text[:12]])
    logits = target.forward(ids, target.new_cache(ids.shape[1])).logits[0, len(PROMPT) - 1 :]
    two = np.sort(logits.numpy(), axis=-1)[:, -2:]
    np.testing.assert_allclose(result.margins, two[:, 1] - two[:, 0], atol=1e-4)


def test_text_and_arms_are_functions_of_their_seeds(llama) -> None:
    target, text = llama
    arms = {name: Scripted(name, K, PROMPT, text, (1,)) for name in "abc"}
    chosen = []
    for seed in (0, 0, 1):
        result = run(target, PROMPT, arms, {"kind": "random"}, limit=30, selector_seed=seed)
        assert result.tokens == text[:30]
        chosen.append([row["arm"] for row in result.rounds])
    assert chosen[0] == chosen[1] != chosen[2]


# --- D-9: the equality above notices each of these mistakes ---------------------------------------------


def _emit_draft_token(draft, choices, limit, ends):
    verdict = match(draft, choices, limit, ends)
    if verdict.matched < min(len(draft), len(verdict.tokens)):
        verdict.tokens[verdict.matched] = draft[verdict.matched]
    return verdict


def _no_break_after_mismatch(draft, choices, limit, ends):
    return match(choices[:-1], choices, limit, ends)


def _rollback_off_by(error: int | None):
    def commit(self, tokens, drafted):
        count = 0 if error is None else drafted + 1 - len(tokens) + error
        self.start.cache.rollback(max(0, count))
        self.answer.extend(tokens)

    return commit


MUTATIONS = {
    "emit the draft's token": ("match", _emit_draft_token),
    "no break after the first mismatch": ("match", _no_break_after_mismatch),
    "no rollback": ("commit", _rollback_off_by(None)),
    "rollback one too few": ("commit", _rollback_off_by(-1)),
    "rollback one too many": ("commit", _rollback_off_by(1)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_d09_sabotage_of_the_loop_is_noticed(mutation, llama, monkeypatch) -> None:
    target, text = llama
    # Much room, so that what is wrong shows in the text and not as a full cache.
    options = {"limit": LIMIT, "room": 150}
    arms = {"d": Scripted("d", K, PROMPT, text, (2, K, 0))}
    assert run(target, PROMPT, arms, **options).tokens == text[:LIMIT]
    name, mutant = MUTATIONS[mutation]
    monkeypatch.setattr(*((engine, "match", mutant) if name == "match" else (Sequence, "commit", mutant)))
    assert run(target, PROMPT, arms, **options).tokens != text[:LIMIT]


def _block(self, draft_ids) -> torch.Tensor:
    return torch.tensor([[self.answer[-1], *([] if draft_ids is None else draft_ids.tolist())]])


def _stale_taps(self, draft_ids):
    return self.target.forward(_block(self, draft_ids), self.start.cache).logits[0]


def _rejected_taps(self, draft_ids):
    """Taps of the rejected tokens are left where those of the committed ones belong."""
    block = _block(self, draft_ids)
    output = self.target.forward(block, self.start.cache)
    place, drafted = self.anchor_place + 1, block.shape[1] - 1
    self.start.taps[place : place + drafted] = output.taps[0, :drafted]
    return output.logits[0]


def _all_drafts_are_fresh(target, limit: int = 24) -> bool:
    # A random drafter is nearly always rejected; the scripted one makes it meet partly accepted blocks.
    text = run(target, PROMPT, {"plain": None}, limit=limit, room=K).tokens
    arms = {
        "scripted": Scripted("scripted", K, PROMPT, text, (2, K, 0, 1)),
        "block": Watched(random_drafter(target, "block")),
    }
    result = run(target, PROMPT, arms, {"kind": "round_robin"}, limit=limit)
    assert result.tokens == text
    seen, equal = arms["block"].seen, True
    assert len(seen) > 3
    for length, anchor, draft in seen:
        sequence = (PROMPT + text)[: length + 1]
        assert sequence[-1] == anchor
        fresh = fresh_draft(arms["block"].inner, target, sequence)
        close = torch.allclose(draft.log_q, fresh.log_q, atol=1e-3)
        equal = equal and close and torch.equal(draft.ids, fresh.ids)
    return equal


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_d18_drafts_after_partial_acceptance_are_those_of_a_fresh_context(family, targets) -> None:
    assert _all_drafts_are_fresh(_loaded(getattr(targets, family))[0])


@pytest.mark.parametrize("mutant", [_stale_taps, _rejected_taps])
def test_d09_stale_taps_are_noticed_in_the_drafts(mutant, llama, monkeypatch) -> None:
    monkeypatch.setattr(Sequence, "verify", mutant)
    assert not _all_drafts_are_fresh(llama[0])


# --- D-19: idle arms ------------------------------------------------------------------------------------


class _Schedule(Selector):
    """Plays the arm that a list names; asks for full information if told to."""

    needs = "bandit"

    def start(self) -> None:
        pass

    def choose(self, t, available, draws):
        return np.array([self.plan[t]]), np.ones(1)

    def learn(self, arms, feedback) -> None:
        pass


def _play(target, arms: dict, plan: list[int], limit: int, needs: str = "bandit"):
    chooser = _Schedule(list(arms))
    chooser.plan, chooser.needs = plan, needs
    start = prefill(target, PROMPT, limit, K)
    return engine.decode(target, start, arms, chooser, Sampling(limit, ()), K, "p")


def test_d19_an_idle_drafter_drafts_what_a_busy_one_does(llama) -> None:
    target, text = llama
    limit, idle = 45, 20
    plan = [1] + [0] * idle + [1] * limit
    rested, busy = (Watched(random_drafter(target, "b")) for _ in range(2))
    result = _play(target, {"plain": None, "b": rested}, plan, limit)
    # With full information the drafter reads and drafts in every round.
    full = _play(target, {"plain": None, "b": busy}, plan, limit, needs="full")
    assert result.tokens == full.tokens == text[:limit]
    assert [row["position"] for row in result.rounds] == [row["position"] for row in full.rounds]
    back = next(draft for draft in rested.seen if draft[0] > len(PROMPT))
    assert back[0] >= len(PROMPT) + idle
    same = next(draft for draft in busy.seen if draft[:2] == back[:2])
    assert torch.equal(back[2].ids, same[2].ids)
    torch.testing.assert_close(back[2].log_q, same[2].log_q, atol=1e-4, rtol=1e-4)


def test_d19_catching_up_is_charged_to_the_switch(llama, monkeypatch) -> None:
    target, _ = llama
    drafter, pause = random_drafter(target, "b"), 0.02
    catch_up, caught = drafter.catch_up, []

    def slow(tokens, taps):
        caught.append(len(tokens))
        time.sleep(pause)
        catch_up(tokens, taps)

    monkeypatch.setattr(drafter, "catch_up", slow)
    result = _play(target, {"plain": None, "b": drafter}, [1] + [0] * 20 + [1] * 9, 24)
    paused = [row["round"] for row in result.rounds if row["t_switch"] >= pause]
    assert paused[:2] == [0, 21]
    assert caught[:2] == [len(PROMPT), result.rounds[21]["position"]] and caught[1] >= 20
    assert sum(row["t_switch"] for row in result.rounds) >= pause * len(caught)


# --- full information -----------------------------------------------------------------------------------


def test_losses_in_the_records_are_those_of_the_final_text(llama) -> None:
    target, text = llama
    limit = 25
    arms = {
        "a": Scripted("a", 3, PROMPT, text, (3, 0, 2)),
        "b": Scripted("b", K, PROMPT, text, (1, K)),
        "plain": None,
    }
    result = run(target, PROMPT, arms, {"kind": "hedgespec"}, limit=limit)
    assert result.tokens == text[:limit]
    given, open_rounds = 0, 0
    for number, row in enumerate(result.rounds):
        # Every drafter drafts once a round, so the script tells what it got right.
        right = [arms[name].script[number % len(arms[name].script)] for name in ("a", "b")] + [0]
        left = limit - 1 - row["position"]
        known = all(hits < left or hits == k <= left for hits, k in zip(right, (3, K, 0), strict=True))
        expected = [1.0 - (hits + 1) / (K + 1) for hits in right]
        assert row["losses"] == (pytest.approx(expected) if known else None)
        given, open_rounds = given + known, open_rounds + (not known)
    assert given > 3 and open_rounds > 0


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_losses_are_delivered_when_the_text_decides_them(data) -> None:
    n_arms, k_pool = data.draw(st.integers(1, 3)), 4
    answer = [0]
    pending, open_rounds = PendingLosses(k_pool), {}
    for round_ in range(data.draw(st.integers(1, 8))):
        drafts = [data.draw(st.lists(st.integers(0, 1), max_size=k_pool)) for _ in range(n_arms)]
        pending.add(round_, len(answer), drafts)
        open_rounds[round_] = (len(answer), drafts)
        answer = answer + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=k_pool + 1))
        expected = []
        for number, (start, made) in list(open_rounds.items()):
            losses = []
            for draft in made:
                pairs = list(zip(draft, answer[start:], strict=False))
                wrong = [place for place, (guess, token) in enumerate(pairs) if guess != token]
                if wrong or len(pairs) == len(draft):
                    losses.append(1.0 - ((wrong[0] if wrong else len(draft)) + 1) / (k_pool + 1))
            if len(losses) == n_arms:
                expected.append((number, losses))
                del open_rounds[number]
        completed = pending.deliver(answer)
        got = (
            []
            if completed is None
            else list(zip(completed.round.tolist(), completed.loss.tolist(), strict=True))
        )
        assert got == [(number, pytest.approx(losses)) for number, losses in expected]


def test_length_loss_spans_the_unit_interval() -> None:
    assert [length_loss(accepted, 3) for accepted in (0, 3)] == [0.75, 0.0]


def test_a_drafter_with_too_few_positions_is_named(llama) -> None:
    target, _ = llama
    with pytest.raises(DraftpoolError, match="`d`: needs 257 positions, has 256"):
        random_drafter(target, "d").reset(253)
