"""The decoding loop: select, draft, verify, commit, learn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from draftpool import draws
from draftpool.decoding.clock import PARTS, Mark, make_clock
from draftpool.decoding.evaluation import PoolEvaluation
from draftpool.decoding.feedback import PendingLosses, SlotProbabilities
from draftpool.decoding.sequence import Prefilled, Sampling, Sequence
from draftpool.decoding.verification import Verdict, acceptance_probability, match, target_choices
from draftpool.drafters.base import Draft, Drafter
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
) -> Result:
    """Decode one answer under one selector.

    Args:
        target: The model whose text is kept.
        start: The prompt, already read.
        arms: Drafters by name in the selector's order; None is plain decoding.
        selector: A selector over these arms; it is reset, unless `resumed` or in a later turn of a session.
        sampling: Temperature, seed, limit and end ids.
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
    probabilities = SlotProbabilities(k_pool)
    available = np.ones((1, len(names)), dtype=bool)
    noise = draws.RoundDraws(
        len(names) + 1, *draws.selector_key(selector_seed, sampling.sample_seed, session or prompt_id)
    )
    sequence = Sequence(start, target, arms, sampling)
    if selector.needs == "full":
        evaluation = evaluation or PoolEvaluation(arms, target.head_weight)
        evaluation.reset(start.length + sampling.max_new_tokens)
    first = target_choices(start.first_logits, sampling.temperature, sampling.sample_seed, prompt_id, 0)
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
            drafts, played = list(evaluated.values()), arm
            clock.lap("t_evaluate")
        else:
            sequence.catch_up(names[arm])
            clock.lap("t_switch")
            drafter = arms[names[arm]]
            drafts, played = [None if drafter is None else drafter.draft(sequence.answer[-1])], 0
            clock.lap("t_draft")
        draft = drafts[played]
        logits = sequence.verify(None if draft is None else draft.ids)
        choices = target_choices(
            logits, sampling.temperature, sampling.sample_seed, prompt_id, len(sequence.answer)
        )
        gamma = _acceptance(draft, logits) if selector.reads_bd else None
        *proposals, chosen_ids, slots = _to_host(
            [*(None if made is None else made.ids for made in drafts), choices, gamma]
        )
        draft_ids = proposals[played]
        verdict = match(draft_ids, chosen_ids, sampling.max_new_tokens - len(sequence.answer), sampling.ends)
        clock.lap("t_verify")
        first = None
        if full:
            pending.add(t, len(sequence.answer), proposals)
            first = _first_slots(proposals, chosen_ids[0])
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
            (slots,) = _to_host([_acceptance(draft, logits)])
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


def _first_slots(proposals: list[list[int]], token: int) -> FirstSlots:
    """Whether every arm's first proposed token is the target's."""
    hit = np.array([[bool(draft) and draft[0] == token for draft in proposals]])
    return FirstSlots(np.array([True]), hit)


def _acceptance(draft: Draft | None, logits: Tensor) -> Tensor | None:
    """Acceptance probability of every slot [k], or None without a draft distribution."""
    if draft is None or draft.log_q is None:
        return None
    return acceptance_probability(draft.log_q, draft.vocabulary, logits[:-1])


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
