"""The decoding loop: select, draft, verify, commit, learn."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from draftpool import draws
from draftpool.decoding.clock import PARTS, Mark, make_clock
from draftpool.decoding.evaluation import PoolEvaluation
from draftpool.decoding.feedback import PendingLosses, SlotProbabilities
from draftpool.decoding.rejection import Rejection
from draftpool.decoding.sequence import Prefilled, Sampling, Sequence
from draftpool.decoding.verification import (
    Verdict,
    acceptance_probability,
    cut,
    match,
    proposed_probability,
    target_choices,
)
from draftpool.drafters.base import Draft, Drafter, most_likely
from draftpool.selectors.base import Completed, Context, Feedback, FirstSlots, Selector
from draftpool.targets.base import TargetModel


@dataclass
class Result:
    """One decoded answer: token ids, one record per round, the decoding time in seconds, top-2 margins.

    The time is the sum of the rounds' parts: drafter prefill and catch-up are in it, the target's prefill
    (`prefill_seconds`) and the writing of records are not.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    margins: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0


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
    context: Context | None = None,
    resumed: bool = False,
    session: str | None = None,
    rounds_before: int = 0,
    hard: bool = False,
) -> Result:
    """Decode one answer under one selector.

    Under `rejection` above temperature 0 every arm that has a distribution samples its draft, evaluated ones too; the
    token at prefill and rounds without a draft are sampled as under `match`. Full information keeps its meaning there:
    an arm's loss counts how far its sampled draft matches the text that was committed, not what would have been kept.

    Args:
        target: The model whose text is kept.
        start: The prompt, already read.
        arms: Drafters by name in the selector's order; None is plain decoding.
        selector: A selector over these arms; it is reset, unless `resumed` or in a later turn of a session.
        sampling: Temperature, top-p, rule of verification, seed, limit and end ids.
        k_pool: Longest draft of the pool, the scale of rewards.
        prompt_id: Keys the draws of the text, and the selector's outside sessions.
        selector_seed: Keys the draws of the selector.
        keep_margins: Also keep the target's top-2 margin of every committed token (for half precision).
        evaluation: Evaluates these arms for a full-information selector; made here if it is not given.
        marks: Parts of the rounds are added to it, for the profiler.
        context: What some selectors need besides feedback.
        resumed: The selector goes on from the query before; one that carries nothing begins anew.
        session: Keys the selector's draws in all turns of a session.
        rounds_before: Rounds that the selector played in earlier turns of this session; from the second turn on it
            simply goes on, whatever it carries.
        hard: The acceptance probability of a slot is the target's probability of the proposed token: one scale for a
            pool in which some arms have no distribution.

    Returns:
        The answer; the token sampled at prefill belongs to no round.
    """
    names, clock, result = list(arms), make_clock(target.device, marks), Result()
    lengths = np.array([0 if drafter is None else drafter.k for drafter in arms.values()])
    if rounds_before:
        pass
    elif resumed:
        selector.resume()
    else:
        selector.reset(len(names), lengths, 1, context)
    pending = PendingLosses(k_pool, whole=selector.reads_gamma)
    probabilities = SlotProbabilities(k_pool, hard)
    noise = draws.RoundDraws(
        len(names) + 1, *draws.selector_key(selector_seed, sampling.sample_seed, session or prompt_id)
    )
    rejection = None
    if sampling.rejects:
        seeds = (sampling.sample_seed, selector_seed)
        rejection = Rejection(sampling.temperature, sampling.top_p, *seeds, prompt_id)
    sequence = Sequence(start, target, arms, sampling)
    # Where no arm has enough positions all are offered, and the text is written plainly.
    available = np.array([[sequence.fits[name] for name in names]])
    available |= not available.any()
    if selector.needs == "full":
        evaluation = evaluation or PoolEvaluation(arms, target.head_weight)
        if rejection is not None:
            # It evaluates the stacked drafters only: the others may look at what was drawn for earlier slots.
            evaluation = copy.copy(evaluation)
            evaluation.alone = []
        evaluation.reset(start.length + sampling.max_new_tokens)
    text = (sampling.temperature, sampling.sample_seed, prompt_id)
    first = target_choices(start.first_logits, *text, 0, sampling.top_p)
    sequence.answer.append(int(first[0]))
    if keep_margins:
        result.margins.extend(top2_margin(start.first_logits).tolist())
    while sequence.answer[-1] not in sampling.ends and len(sequence.answer) < sampling.max_new_tokens:
        t, position = rounds_before + len(result.rounds), len(sequence.answer) - 1
        parts = clock.start()
        chosen, propensity = selector.select(t, available, noise.row(t))
        arm = int(chosen[0])
        full = bool(selector.evaluates(t)[0])
        clock.lap("t_select")
        if full:
            # The evaluation holds the chosen arm's draft too, so nothing is drafted twice.
            evaluated = evaluation.evaluate(
                sequence.answer[-1], sequence.anchor_place, sequence.unread, sequence.catch_up
            )
            if rejection is not None:
                evaluated = _drawn(evaluated, sequence, rejection, t)
            drafts, played = list(evaluated.values()), arm
            clock.lap("t_evaluate")
        else:
            sequence.catch_up(names[arm])
            clock.lap("t_switch")
            choose = most_likely if rejection is None else rejection.choose(names[arm], int(lengths[arm]), t)
            drafts, played = [sequence.draft(names[arm], choose)], 0
            clock.lap("t_draft")
        draft = drafts[played]
        logits = sequence.verify(None if draft is None else draft.ids)
        matches = rejection is None or len(logits) == 1
        choices = target_choices(logits, *text, len(sequence.answer), sampling.top_p) if matches else None
        gamma = _acceptance(draft, logits, hard) if selector.reads_bd else None
        *proposals, chosen_ids, slots = _to_host(
            [*(None if made is None else made.ids for made in drafts), choices, gamma]
        )
        draft_ids = proposals[played]
        left = sampling.max_new_tokens - len(sequence.answer)
        if matches:
            verdict = match(draft_ids, chosen_ids, left, sampling.ends)
        else:
            kept = rejection.verify(names[arm], draft_ids, draft.vocabulary, logits, t)
            verdict = cut(kept.tokens, kept.accepted, left, sampling.ends)
        clock.lap("t_verify")
        first = None
        if full:
            pending.add(t, len(sequence.answer), proposals)
            first = _first_slots(proposals, verdict.tokens[0])
        if selector.reads_gamma:
            rows = logits[: len(verdict.tokens)]
            probabilities.add(t, len(sequence.answer), drafts if full else None, rows)
            if first is not None:
                first = FirstSlots(first.evaluated, first.hit, probabilities.slots(t, 1)[None, :, 0])
            clock.lap("t_evaluate")
        sequence.commit(verdict.tokens, len(draft_ids))
        clock.lap("t_commit")
        completed = pending.deliver(sequence.answer) if selector.needs == "full" else None
        if completed is not None and selector.reads_gamma:
            gamma_of_rounds = probabilities.take(completed.round)
            completed = Completed(completed.episode, completed.round, completed.loss, gamma_of_rounds)
            clock.lap("t_evaluate")
        feedback = Feedback(
            accepted=np.array([verdict.accepted]),
            drafted=np.array([len(draft_ids)]),
            committed=np.array([len(verdict.tokens)]),
            reward_be=np.array([verdict.accepted / k_pool]),
            reward_bd=np.array([_reward_bd(slots, verdict)]),
            reward_bd_full=np.array([_mean(slots)]) if selector.reads_bd_full else None,
            active=np.array([True]),
            completed=completed,
            first=first,
        )
        selector.update(chosen, feedback)
        clock.lap("t_select")
        # From here on nothing is timed: records are ours, not the method's.
        if gamma is None:
            (slots,) = _to_host([_acceptance(draft, logits, hard)])
        if keep_margins:
            result.margins.extend(top2_margin(logits[: len(verdict.tokens)]).tolist())
        result.rounds.append(
            {
                "round": t - rounds_before,
                "arm": names[arm],
                "position": position,
                "n_drafted": len(draft_ids),
                "n_accepted": verdict.accepted,
                "n_committed": len(verdict.tokens),
                "hit_eos": verdict.hit_eos,
                "hit_limit": verdict.hit_limit,
                "reward_be": verdict.accepted / k_pool,
                "reward_bd": _reward_bd(slots, verdict),
                "propensity": float(propensity[0]),
                "evaluated": full,
                "losses": None,
                "parts": parts,
            }
        )
        if completed is not None:
            for round_, losses in zip(completed.round, completed.loss, strict=True):
                result.rounds[round_ - rounds_before]["losses"] = losses.tolist()
    clock.finish()
    for row in result.rounds:
        row |= row.pop("parts")
    result.seconds = sum(row[part] for row in result.rounds for part in PARTS)
    result.tokens, result.prefill_seconds = sequence.answer, start.seconds
    return result


def _drawn(
    evaluated: dict[str, Draft | None], sequence: Sequence, rejection: Rejection, round_: int
) -> dict[str, Draft | None]:
    """Drafts of all arms under `rejection`, each drawn as if its arm were played.

    Args:
        evaluated: Greedy drafts of the stacked drafters, whose slots do not look at each other's tokens; None for all
            other arms.
        sequence: The text.
        rejection: Holds the draws.
        round_: Round number.
    """
    drafts = dict(evaluated)
    for name, greedy in evaluated.items():
        if sequence.arms[name] is None:
            continue
        choose = rejection.choose(name, sequence.arms[name].k, round_)
        if greedy is None:
            sequence.catch_up(name)
            drafts[name] = sequence.draft(name, choose)
        else:
            drafts[name] = replace(greedy, ids=greedy.vocabulary[choose(greedy.log_q, 0)])
    return drafts


def _first_slots(proposals: list[list[int]], token: int) -> FirstSlots:
    """Whether every arm's first proposed token is the one that was committed (under `match` the target's)."""
    hit = np.array([[bool(draft) and draft[0] == token for draft in proposals]])
    return FirstSlots(np.array([True]), hit)


def _acceptance(draft: Draft | None, logits: Tensor, hard: bool) -> Tensor | None:
    """Acceptance probability of every slot [k], or None without a draft (or its distribution, where it is read)."""
    if draft is None or not len(draft.ids):
        return None
    if hard:
        return proposed_probability(draft.ids, logits[:-1])
    return None if draft.log_q is None else acceptance_probability(draft.log_q, draft.vocabulary, logits[:-1])


def _to_host(parts: list[Tensor | None]) -> list[list]:
    """Several vectors of ids or probabilities in one transfer; None becomes an empty list.

    Doubles hold all ids and all float32 exactly.
    """
    lengths = [0 if part is None else len(part) for part in parts]
    if not any(lengths):
        return [[] for _ in parts]
    values = iter(torch.cat([part.double() for part in parts if part is not None]).tolist())
    taken = [list(islice(values, length)) for length in lengths]
    return [
        made if part is None or part.is_floating_point() else [int(value) for value in made]
        for part, made in zip(parts, taken, strict=True)
    ]


def _reward_bd(gamma: list[float], verdict: Verdict) -> float:
    """Mean acceptance probability up to and including the first reject (MetaSD's BD on verified prefixes)."""
    return _mean(gamma[: min(verdict.matched + 1, verdict.left)])


def _mean(gamma: list[float]) -> float:
    return float(np.mean(gamma, dtype=np.float32)) if gamma else math.nan
