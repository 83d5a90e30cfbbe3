"""`rejection` in the decoding loop: the law of whole texts, by a walk over all that can be drawn; ends and limits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import chisquare
from scripted import Scripted
from torch import Tensor

from draftpool.decoding import engine, rejection
from draftpool.decoding.engine import Result, decode
from draftpool.decoding.rejection import SampledDraft, distribution
from draftpool.decoding.sequence import Sampling, prefill
from draftpool.drafters.base import Draft, most_likely
from draftpool.selectors.base import make_selector
from draftpool.targets.base import TargetOutput

VOCABULARY = 5
PROMPT = [4, 0]
TABLE = torch.from_numpy(np.random.default_rng(5).normal(0, 1.0, (VOCABULARY, VOCABULARY))).float()
# After the prompt two tokens are possible, which keeps the number of texts small.
TABLE[0, [0, 1, 3]] = float("-inf")


class Markov:
    """A target whose next token depends on the last one (protocol of :mod:`draftpool.targets.base`, what is used)."""

    def __init__(self, table: Tensor = TABLE):
        self.table, self.device, self.dtype = table, torch.device("cpu"), torch.float32
        self.head_weight = torch.zeros(len(table), 1)

    def new_cache(self, max_length: int, batch: int = 1):
        cache = SimpleNamespace(lengths=[0])

        def rollback(count: int) -> None:
            cache.lengths[0] -= count

        cache.rollback = rollback
        return cache

    def forward(self, ids: Tensor, cache, logits: str = "all", counts=None) -> TargetOutput:
        cache.lengths[0] += ids.shape[1]
        rows = self.table[ids]
        return TargetOutput(rows[:, -1:] if logits == "last" else rows, torch.zeros(*ids.shape, 1))


class Toy:
    """What toy drafters share."""

    name, modelled = "toy", True
    vocabulary = torch.tensor([4, 0, 2])

    def __init__(self, k: int = 2):
        self.k = k
        rng = np.random.default_rng(11)
        self.log_q = torch.from_numpy(rng.normal(0, 1.5, (k, VOCABULARY, 3))).float().log_softmax(dim=-1)

    def fits(self, max_length: int) -> bool:
        return True

    def reset(self, max_length: int) -> None:
        pass

    def prefill(self, prompt: Tensor, taps: Tensor) -> None:
        pass

    catch_up = prefill

    def state_bytes(self) -> int:
        return 0

    def weights(self) -> list[Tensor]:
        return []


class Block(Toy):
    """All slots at once, over a reduced vocabulary."""

    def draft(self, anchor: int, choose=most_likely) -> Draft:
        log_q = self.log_q[:, anchor]
        return Draft(self.vocabulary[choose(log_q, 0)], log_q, self.vocabulary)


class Chain(Toy):
    """Slot by slot, each given the token before it."""

    vocabulary = torch.tensor([1, 3, 2])

    def draft(self, anchor: int, choose=most_likely) -> Draft:
        token, ids, rows = anchor, [], []
        for slot in range(self.k):
            rows.append(self.log_q[slot, token][None])
            ids.append(self.vocabulary[choose(rows[-1], slot)])
            token = int(ids[-1])
        return Draft(torch.cat(ids), torch.cat(rows), self.vocabulary)


class Greedy(Toy):
    """One proposal without a distribution."""

    modelled = False

    def draft(self, anchor: int, choose=most_likely) -> Draft:
        return Draft(torch.tensor([(anchor + 1) % VOCABULARY, 4][: self.k]), None, None)


def texts_of(
    arms: dict,
    temperature: float,
    top_p: float,
    length: int,
    ends=(),
    selector: dict | None = None,
    k: int = 2,
    sample_seed: int = 0,
    selector_seed: int = 0,
) -> tuple[int, ...]:
    """One text of the engine under `rejection` (arms in turn by default)."""
    target = Markov()
    made = {name: None if drafter is None else drafter(k) for name, drafter in arms.items()}
    chooser = make_selector(selector or {"kind": "round_robin"}, list(made))
    sampling = Sampling(length, ends, temperature, sample_seed, top_p, "rejection")
    start = prefill(target, PROMPT, length, k)
    return tuple(decode(target, start, made, chooser, sampling, k, "p", selector_seed).tokens)


def law_of_texts(temperature: float, top_p: float, length: int, ends=()) -> dict[tuple[int, ...], float]:
    """Law of plain top-p sampling after the prompt."""
    rows = distribution(TABLE, temperature, top_p).tolist()
    law, waiting = {}, [((), 1.0)]
    while waiting:
        text, chance = waiting.pop()
        if len(text) == length or (text and text[-1] in ends):
            law[text] = chance
        else:
            last = text[-1] if text else PROMPT[-1]
            waiting += [((*text, token), chance * p) for token, p in enumerate(rows[last]) if p > 0.0]
    return law


def total_variation(one: dict, other: dict) -> float:
    """Distance of two laws."""
    return 0.5 * sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in set(one) | set(other))


class Walker:
    """Runs a program once for every outcome of its draws, and knows how likely each run was.

    A draw is made by the real function, from the uniform in the middle of those that give the outcome.
    """

    def __init__(self):
        self.real_rows, self.real_keeps = rejection.sample_rows, rejection.keeps
        # Of every draw on the way: its possible outcomes, and which one is taken.
        self.path: list[list] = []

    def branch(self, chances: list[float]) -> int:
        """The outcome of the next draw."""
        if self.place == len(self.path):
            self.path.append([[outcome for outcome, chance in enumerate(chances) if chance > 0.0], 0])
        outcomes, taken = self.path[self.place]
        self.place += 1
        self.chance *= chances[outcomes[taken]]
        return outcomes[taken]

    def sample_rows(self, p: Tensor, uniforms: Tensor) -> Tensor:
        assert len(uniforms) == len(p) and ((uniforms > 0) & (uniforms < 1)).all()
        outcomes, middles = [], []
        for row in p.tolist():
            outcomes.append(self.branch(row))
            middles.append((sum(row[: outcomes[-1]]) + 0.5 * row[outcomes[-1]]) / sum(row))
        found = self.real_rows(p, torch.tensor(middles, dtype=torch.float64))
        assert found.tolist() == outcomes
        return found

    def keeps(self, probability: float, uniform: float) -> bool:
        kept = bool(self.branch([1.0 - probability, probability]))
        assert self.real_keeps(probability, 0.5 * probability if kept else 0.5 + 0.5 * probability) == kept
        return kept

    def target_choices(self, logits, temperature, sample_seed, prompt_id, position, top_p=1.0) -> Tensor:
        """Of plain steps; their own law is tested with `match`."""
        assert len(logits) == 1
        return torch.tensor([self.branch(distribution(logits[0], temperature, top_p).tolist())])

    def law(self, program: Callable[[], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
        """Law of what a program returns."""
        law: dict[tuple[int, ...], float] = {}
        while True:
            self.place, self.chance = 0, 1.0
            result = program()
            law[result] = law.get(result, 0.0) + self.chance
            while self.path and self.path[-1][1] == len(self.path[-1][0]) - 1:
                self.path.pop()
            if not self.path:
                return law
            self.path[-1][1] += 1


# --- the law of whole texts -----------------------------------------------------------------------------

LENGTH = 3
ARMS = {
    "block": {"block": Block},
    "chain": {"chain": Chain},
    "one-hot": {"greedy": Greedy},
    "mixed": {"chain": Chain, "greedy": Greedy, "plain": None, "block": Block},
}


def walked_law(arms: dict, temperature: float, top_p: float, monkeypatch, ends=(), **options) -> dict:
    """Law of the texts that the engine writes: every draw takes each of its values, with its probability."""
    walker = Walker()
    with monkeypatch.context() as patched:
        patched.setattr(rejection, "sample_rows", walker.sample_rows)
        patched.setattr(rejection, "keeps", walker.keeps)
        patched.setattr(engine, "target_choices", walker.target_choices)
        return walker.law(lambda: texts_of(arms, temperature, top_p, LENGTH, ends, **options))


@pytest.mark.parametrize("arms", ARMS)
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_d05_the_law_of_whole_texts_of_the_engine_is_plain_top_p_sampling(
    temperature, top_p, arms, monkeypatch
):
    made = walked_law(ARMS[arms], temperature, top_p, monkeypatch)
    assert total_variation(made, law_of_texts(temperature, top_p, LENGTH)) < 1e-12
    assert len(made) > 4


def test_d05_the_law_holds_with_ends_and_with_full_information(monkeypatch):
    arms, selector = {"chain": Chain, "block": Block, "greedy": Greedy}, {"kind": "hedgespec"}
    made = walked_law(arms, 1.0, 0.9, monkeypatch, ends={2}, selector=selector, k=1)
    plain = law_of_texts(1.0, 0.9, LENGTH, ends={2})
    assert total_variation(made, plain) < 1e-12
    assert {len(text) for text in made} == {1, 2, 3}


def unwarped(self, log_q, first_slot):
    """Mistake: q is what the drafter said, before temperature and top-p."""
    chosen = drawn(self, log_q, first_slot)
    self.rows[-1] = log_q.double().softmax(dim=-1)
    return chosen


def not_drawn(self, log_q, first_slot):
    """Mistake: the proposal is the most likely token, and q what it was not drawn from."""
    drawn(self, log_q, first_slot)
    return log_q.argmax(dim=-1)


drawn = SampledDraft.__call__


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.9)])
@pytest.mark.parametrize("mistake", [unwarped, not_drawn])
def test_d05_a_wrong_q_has_another_law(mistake, temperature, top_p, monkeypatch):
    monkeypatch.setattr(SampledDraft, "__call__", mistake)
    made = walked_law(ARMS["block"], temperature, top_p, monkeypatch)
    assert total_variation(made, law_of_texts(temperature, top_p, LENGTH)) > 1e-3


def counted(selector: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """How often the engine wrote each text with its own draws, and how often it should have."""
    law = {text: chance for text, chance in law_of_texts(0.7, 0.9, LENGTH).items() if chance > 0.0}
    counts = dict.fromkeys(law, 0)
    for seed in range(n):
        text = texts_of(
            ARMS["mixed"], 0.7, 0.9, LENGTH, selector={"kind": selector}, sample_seed=seed, selector_seed=seed
        )
        counts[text] += 1
    return np.array(list(counts.values())), n * np.array(list(law.values()))


@pytest.mark.parametrize("selector", ["random", "hedgespec"])
def test_d05_the_engine_s_own_draws_follow_the_law(selector):
    found, expected = counted(selector, 4_000)
    assert expected.min() > 4 and chisquare(found, expected * found.sum() / expected.sum()).pvalue > 1e-4


def test_d05_draws_that_are_not_independent_have_another_law(monkeypatch):
    uniform = rejection.draws.uniform
    # Mistake: a draft and its verification see the same numbers.
    monkeypatch.setattr(
        rejection.draws, "uniform", lambda size, purpose, *key: uniform(size, "same", *key[:3], key[-1])
    )
    found, expected = counted("random", 2_000)
    assert chisquare(found, expected * found.sum() / expected.sum()).pvalue < 1e-6


# --- ends and limits ------------------------------------------------------------------------------------

K, LIMIT, LAST = 5, 14, 3
# A target that is certain of the next token: the text counts up.
COUNTING = 60.0 * torch.eye(120).roll(1, dims=1)
TEXT = [(LAST + 1 + place) % 120 for place in range(LIMIT + K + 1)]
SCRIPTS = [(0,), (1,), (K - 1,), (K,), (0, K, 1, K - 1, 2)]


class Certain(Scripted):
    """The scripted tokens, each drawn from a distribution that is certain of it, columns in another order."""

    modelled = True
    vocabulary = torch.arange(120).flip(0)

    def draft(self, anchor: int, choose=most_likely) -> Draft:
        columns = 119 - super().draft(anchor).ids
        log_q = (60.0 * torch.nn.functional.one_hot(columns, 120)).log_softmax(dim=-1)
        return Draft(self.vocabulary[choose(log_q, 0)], log_q, self.vocabulary)


def records(result: Result) -> pd.DataFrame:
    """Records of the rounds but for their times."""
    frame = pd.DataFrame(result.rounds)
    return frame[[name for name in frame if not name.startswith("t_")]]


def counted_up(drafter: Scripted, limit: int, ends, temperature: float, verification: str) -> Result:
    target = Markov(COUNTING)
    sampling = Sampling(limit, ends, temperature, 0, 0.95, verification)
    chooser = make_selector({"kind": "fixed", "arm": "d"}, ["d"])
    return decode(target, prefill(target, [9, LAST], limit, K), {"d": drafter}, chooser, sampling, K, "p")


@pytest.mark.parametrize("kind", [Scripted, Certain])
def test_d12_d14_ends_and_limits_cut_as_under_match(kind) -> None:
    places, limits = set(), set()
    for script in SCRIPTS:
        for limit, end in [(LIMIT, TEXT[place]) for place in range(LIMIT)] + [
            (n, 0) for n in range(1, LIMIT)
        ]:
            drafters = [kind("d", K, [9, LAST], TEXT, script) for _ in range(2)]
            greedy = counted_up(drafters[0], limit, {end}, 0.0, "match")
            drawn = counted_up(drafters[1], limit, {end}, 1.0, "rejection")
            length = min(limit, TEXT.index(end) + 1 if end in TEXT else limit)
            assert drawn.tokens == greedy.tokens == TEXT[:length]
            if greedy.rounds:
                pd.testing.assert_frame_equal(records(drawn), records(greedy))
                last = drawn.rounds[-1]
                assert last["hit_eos"] == (end in TEXT) and last["hit_limit"] == (length == limit)
                place = (last["n_committed"] - 1, last["n_accepted"] == last["n_committed"])
                (places if last["hit_eos"] else limits).add(place)
    # Accepted at block positions 0, middle and last, and as the target's own token behind an accepted block.
    every = {(0, True), (2, True), (K - 1, True), (K, False), (0, False), (1, False)}
    assert places >= every and limits >= every
