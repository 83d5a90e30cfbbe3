"""The decoding loop: select, draft, verify, commit, learn."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from draftpool import draws
from draftpool.decoding.evaluation import PoolEvaluation
from draftpool.decoding.feedback import PendingLosses
from draftpool.decoding.verification import Verdict, acceptance_probability, match, target_choices
from draftpool.drafters.base import Draft, Drafter
from draftpool.selectors.base import Feedback, Selector
from draftpool.targets.base import TargetModel
from draftpool.targets.load import synchronise


@dataclass
class Prefilled:
    """A prompt that the target has read; every selector starts from it by rolling the cache back.

    Attributes:
        prompt: Token ids.
        cache: The target's cache, holding the prompt (and leftovers of the last run behind it).
        taps: Raw taps [room, taps x hidden]; rows of the prompt are filled.
        first_logits: Logits [1, vocabulary] of the answer's first token.
        seconds: Time of the target's prefill.
    """

    prompt: list[int]
    cache: object
    taps: Tensor
    first_logits: Tensor
    seconds: float

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.prompt)


@dataclass
class Result:
    """One decoded answer: token ids, one record per round, the decoding time in seconds and top-2 margins.

    The time is the sum of the rounds' parts: drafter prefill and catch-up are in it, the target's prefill and the
    writing of records are not.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sampling:
    """How the target's text is drawn and where it ends."""

    max_new_tokens: int
    ends: Collection[int]
    temperature: float = 0.0
    sample_seed: int = 0


def prefill(target: TargetModel, prompt: list[int], max_new_tokens: int, k_pool: int) -> Prefilled:
    """Let the target read a prompt."""
    synchronise(target.device)
    started = time.perf_counter()
    # A last round may overshoot the limit by a whole block before it is cut.
    room = len(prompt) + max_new_tokens + k_pool + 1
    cache = target.new_cache(room)
    output = target.forward(torch.tensor([prompt], device=target.device), cache, "last")
    taps = torch.zeros(room, output.taps.shape[-1], device=target.device, dtype=target.dtype)
    taps[: len(prompt)] = output.taps[0]
    synchronise(target.device)
    return Prefilled(prompt, cache, taps, output.logits[0], time.perf_counter() - started)


@dataclass(frozen=True)
class Mark:
    """When a part of a round ran, in nanoseconds of the system's clock (for the profiler)."""

    part: str
    start: int
    end: int


class _Clock:
    """Splits a round's time into named parts; the device is synchronised before every reading."""

    def __init__(self, device: torch.device, marks: list[Mark] | None):
        self.device = device
        self.marks, self.last_ns = marks, 0
        self.parts: dict[str, float] = {}
        self.last = 0.0

    def start(self) -> None:
        synchronise(self.device)
        self.parts = dict.fromkeys(
            ("t_select", "t_draft", "t_verify", "t_evaluate", "t_switch", "t_commit"), 0.0
        )
        self.last_ns = time.time_ns()
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        synchronise(self.device)
        now = time.perf_counter()
        self.parts[name] += now - self.last
        self.last = now
        if self.marks is not None:
            now_ns = time.time_ns()
            self.marks.append(Mark(name.removeprefix("t_"), self.last_ns, now_ns))
            self.last_ns = now_ns


class _Sequence:
    """The committed text of one run and the drafters' progress in reading it."""

    def __init__(
        self, start: Prefilled, target: TargetModel, arms: dict[str, Drafter | None], sampling: Sampling
    ):
        self.start, self.target, self.arms = start, target, arms
        start.cache.rollback(start.cache.lengths[0] - start.length)
        self.ids = torch.tensor(start.prompt, device=target.device)
        self.answer: list[int] = []
        self.read = dict.fromkeys(arms, 0)
        for drafter in arms.values():
            if drafter is not None:
                drafter.reset(start.length + sampling.max_new_tokens)

    @property
    def anchor_place(self) -> int:
        """Place of the anchor in the whole sequence: all before it was read by the target."""
        return self.start.length + len(self.answer) - 1

    def catch_up(self, arm: str) -> None:
        """Let a drafter read what was committed while it sat idle."""
        drafter, read, end = self.arms[arm], self.read[arm], self.anchor_place
        if drafter is None or read == end:
            return
        unread = self.unread(read)
        drafter.prefill(*unread) if read == 0 else drafter.catch_up(*unread)
        self.read[arm] = end

    def unread(self, read: int) -> tuple[Tensor, Tensor]:
        """Ids and taps of the committed tokens from place ``read`` up to the anchor."""
        tokens = (self.start.prompt + self.answer)[read : self.anchor_place]
        return torch.tensor(tokens, device=self.target.device), self.start.taps[read : self.anchor_place]

    def verify(self, draft_ids: list[int]) -> Tensor:
        """Target logits [k + 1, vocabulary] after the anchor and every draft token; taps are kept."""
        block = [self.answer[-1], *draft_ids]
        output = self.target.forward(torch.tensor([block], device=self.target.device), self.start.cache)
        place = self.anchor_place
        self.start.taps[place : place + len(block)] = output.taps[0]
        return output.logits[0]

    def commit(self, tokens: list[int], drafted: int) -> None:
        """Append tokens and take what was rejected out of the cache."""
        self.start.cache.rollback(drafted + 1 - len(tokens))
        self.answer.extend(tokens)


def top2_margin(logits: Tensor) -> Tensor:
    """Difference of the two largest logits [n] of [n, vocabulary]."""
    values = logits.float().topk(2, dim=-1).values
    return values[:, 0] - values[:, 1]


def decode(
    target: TargetModel,
    start: Prefilled,
    arms: dict[str, Drafter | None],
    selector: Selector,
    sampling: Sampling,
    k_pool: int,
    prompt_id: str,
    selector_seed: int = 0,
    keep_margins: bool = False,
    evaluation: PoolEvaluation | None = None,
    marks: list[Mark] | None = None,
) -> Result:
    """Decode one answer under one selector.

    Args:
        target: The model whose text is kept.
        start: The prompt, already read.
        arms: Drafters by name in the selector's order; None is plain decoding.
        selector: A selector over these arms; it is reset.
        sampling: Temperature, seed, limit and end ids.
        k_pool: Longest draft of the pool, the scale of rewards.
        prompt_id: Keys the draws of text and selector.
        selector_seed: Keys the draws of the selector.
        keep_margins: Also keep the target's top-2 margin of every committed token (for half precision).
        evaluation: Evaluates these arms for a full-information selector; made here if it is not given.
        marks: Parts of the rounds are added to it, for the profiler.

    Returns:
        The answer; the token sampled at prefill belongs to no round.
    """
    names, clock, result = list(arms), _Clock(target.device, marks), Result()
    lengths = np.array([0 if drafter is None else drafter.k for drafter in arms.values()])
    selector.reset(len(names), lengths, 1)
    pending = PendingLosses(k_pool)
    available = np.ones((1, len(names)), dtype=bool)
    sequence = _Sequence(start, target, arms, sampling)
    if selector.needs == "full":
        evaluation = evaluation or PoolEvaluation(arms, target.head_weight)
        evaluation.reset(start.length + sampling.max_new_tokens)
    first = target_choices(start.first_logits, sampling.temperature, sampling.sample_seed, prompt_id, 0)
    sequence.answer.append(int(first[0]))
    if keep_margins:
        result.margins.extend(top2_margin(start.first_logits).tolist())
    while sequence.answer[-1] not in sampling.ends and len(sequence.answer) < sampling.max_new_tokens:
        t, position = len(result.rounds), len(sequence.answer) - 1
        clock.start()
        keys = draws.uniform(
            (1, len(names) + 1), "selector", selector_seed, sampling.sample_seed, prompt_id, t
        )
        chosen, propensity = selector.select(t, available, keys)
        arm = int(chosen[0])
        clock.lap("t_select")
        if selector.needs == "full":
            # The evaluation holds the chosen arm's draft too, so nothing is drafted twice.
            drafts = evaluation.evaluate(
                sequence.answer[-1], sequence.anchor_place, sequence.unread, sequence.catch_up
            )
            draft = drafts[names[arm]]
            proposals = _proposals(drafts.values())
            pending.add(t, len(sequence.answer), proposals)
            draft_ids = proposals[arm]
            clock.lap("t_evaluate")
        else:
            sequence.catch_up(names[arm])
            clock.lap("t_switch")
            drafter = arms[names[arm]]
            draft = None if drafter is None else drafter.draft(sequence.answer[-1])
            (draft_ids,) = _proposals([draft])
            clock.lap("t_draft")
        logits = sequence.verify(draft_ids)
        choices = target_choices(
            logits, sampling.temperature, sampling.sample_seed, prompt_id, len(sequence.answer)
        )
        verdict = match(
            draft_ids, choices.tolist(), sampling.max_new_tokens - len(sequence.answer), sampling.ends
        )
        clock.lap("t_verify")
        sequence.commit(verdict.tokens, len(draft_ids))
        clock.lap("t_commit")
        reward_bd = math.nan
        if selector.reads_bd:
            reward_bd = _reward_bd(draft, logits, verdict)
        completed = pending.deliver(sequence.answer) if selector.needs == "full" else None
        feedback = Feedback(
            accepted=np.array([verdict.accepted]),
            drafted=np.array([len(draft_ids)]),
            committed=np.array([len(verdict.tokens)]),
            reward_be=np.array([verdict.accepted / k_pool]),
            reward_bd=np.array([reward_bd]),
            active=np.array([True]),
            completed=completed,
        )
        selector.update(chosen, feedback)
        clock.lap("t_select")
        # From here on nothing is timed: records are ours, not the method's.
        result.seconds += sum(clock.parts.values())
        if not selector.reads_bd:
            reward_bd = _reward_bd(draft, logits, verdict)
        if keep_margins:
            result.margins.extend(top2_margin(logits[: len(verdict.tokens)]).tolist())
        result.rounds.append(
            {
                "round": t,
                "arm": names[arm],
                "position": position,
                "n_drafted": len(draft_ids),
                "n_accepted": verdict.accepted,
                "n_committed": len(verdict.tokens),
                "hit_eos": verdict.hit_eos,
                "hit_limit": verdict.hit_limit,
                "reward_be": verdict.accepted / k_pool,
                "reward_bd": reward_bd,
                "propensity": float(propensity[0]),
                "losses": None,
                **clock.parts,
            }
        )
        if completed is not None:
            for round_, losses in zip(completed.round, completed.loss, strict=True):
                result.rounds[round_]["losses"] = losses.tolist()
    result.tokens = sequence.answer
    return result


def _proposals(drafts: Iterable[Draft | None]) -> list[list[int]]:
    """Proposed ids of every draft; plain decoding proposes none. One transfer from the device for all."""
    drafts = list(drafts)
    lengths = [0 if draft is None else len(draft.ids) for draft in drafts]
    if not any(lengths):
        return [[] for _ in drafts]
    flat = iter(torch.cat([draft.ids for draft in drafts if draft is not None]).tolist())
    return [list(islice(flat, length)) for length in lengths]


def _reward_bd(draft: Draft | None, logits: Tensor, verdict: Verdict) -> float:
    """Mean acceptance probability up to and including the first reject (MetaSD's BD on verified prefixes)."""
    if draft is None or draft.log_q is None:
        return math.nan
    slots = min(verdict.matched + 1, len(draft.ids), verdict.left)
    return float(acceptance_probability(draft.log_q[:slots], draft.vocabulary, logits[:slots]).mean())
