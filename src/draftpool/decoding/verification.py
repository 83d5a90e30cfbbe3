"""Verification: which draft tokens are kept. `match` is exact sampling from the target at any temperature.

The other rule, for drafts that were sampled, is :mod:`draftpool.decoding.rejection`; both end a round alike.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from draftpool import draws
from draftpool.decoding.rejection import distribution


@dataclass(frozen=True)
class Verdict:
    """What a round commits.

    Attributes:
        tokens: Committed token ids: the accepted draft tokens and one token of the target, cut at the end of text
            and at the token limit.
        matched: Length of the matching (under `rejection`: kept) prefix of the draft, before any cut.
        accepted: Draft tokens kept, ``min(matched, left)``.
        left: Tokens to the end of the answer as far as this round shows it (end of text included).
        hit_eos: The last committed token ends the text.
        hit_limit: The token limit was reached.
    """

    tokens: list[int]
    matched: int
    accepted: int
    left: int
    hit_eos: bool
    hit_limit: bool


@lru_cache(maxsize=1024)
def gumbel_noise(vocabulary: int, sample_seed: int, prompt_id: str, position: int) -> Tensor:
    """Gumbel noise [vocabulary] for the target's token at one absolute position of an answer.

    Keyed by (sample seed, prompt, position), so that the text depends neither on drafter nor on selector.
    """
    uniform = torch.from_numpy(draws.uniform(vocabulary, "gumbel", sample_seed, prompt_id, position))
    return -torch.log(-torch.log(uniform)).float()


def target_choices(
    logits: Tensor,
    temperature: float,
    sample_seed: int,
    prompt_id: str,
    position: int,
    top_p: float = 1.0,
) -> Tensor:
    """The target's own tokens at consecutive positions: argmax(logits / T + Gumbel noise), at T = 0 the argmax.

    With top-p the argmax is taken over the tokens of the top-p set, which is sampling from it; at T = 0 the most likely
    token is always in it.

    Args:
        logits: [n, vocabulary].
        temperature: T >= 0.
        sample_seed: Which of several texts of a prompt.
        prompt_id: Prompt.
        position: Absolute position in the answer of the first row.
        top_p: In (0, 1]; the set is that of :func:`draftpool.decoding.rejection.distribution`.

    Returns:
        Token ids [n]; on ties the first index.

    Raises:
        DraftpoolError: If top-p is out of its range.
    """
    if temperature > 0.0:
        noise = [
            gumbel_noise(logits.shape[-1], sample_seed, prompt_id, position + row)
            for row in range(logits.shape[0])
        ]
        noisy = logits.float() / temperature + torch.stack(noise).to(logits.device)
        if top_p != 1.0:
            noisy = noisy.masked_fill(distribution(logits, temperature, top_p) == 0.0, float("-inf"))
        logits = noisy
    return logits.argmax(dim=-1)


def match(draft: list[int], choices: list[int], limit: int, ends: Collection[int]) -> Verdict:
    """Accept the longest prefix of the draft that equals the target's own tokens (rule `match`).

    Args:
        draft: Proposed ids [k]; empty for plain decoding.
        choices: The target's own ids at the k + 1 positions from the first drafted one on, each given that all
            earlier draft tokens are right.
        limit: Tokens that may still be committed, at least 1.
        ends: Ids that end a text.
    """
    matched = 0
    while matched < len(draft) and draft[matched] == choices[matched]:
        matched += 1
    return cut(choices[: matched + 1], matched, limit, ends)


def cut(valid: list[int], matched: int, limit: int, ends: Collection[int]) -> Verdict:
    """Cut what a round writes at the end of the text and at the token limit, under either rule.

    Args:
        valid: The kept draft tokens and one token of the target [matched + 1].
        matched: Kept draft tokens.
        limit: Tokens that may still be committed, at least 1.
        ends: Ids that end a text.
    """
    left = limit
    for place, token in enumerate(valid):
        if token in ends:
            left = min(limit, place + 1)
            break
    tokens = valid[:left]
    hit_eos = tokens[-1] in ends
    return Verdict(tokens, matched, min(matched, left), left, hit_eos, len(tokens) == limit)


def target_probabilities(logits: Tensor, vocabulary: Tensor | None) -> Tensor:
    """The target's probabilities at temperature 1 of the tokens that a drafter may propose.

    Args:
        logits: [n, vocabulary].
        vocabulary: Token ids of the drafter's columns [draft vocabulary], or None for all ids.

    Returns:
        float32 [n, draft vocabulary]; rows add up to less than 1 where the vocabulary is reduced.
    """
    p = logits.float().softmax(dim=-1)
    return p if vocabulary is None else p[:, vocabulary]


def overlap(log_q: Tensor, p: Tensor) -> Tensor:
    """1 - TV between drafter and target, row by row: sum over tokens of min(p, q), float32 [n] in [0, 1]."""
    return torch.minimum(p, log_q.float().exp()).sum(dim=-1).clamp(0.0, 1.0)


def proposed_probability(ids: Tensor, logits: Tensor) -> Tensor:
    """The target's probability at temperature 1 of proposed tokens (MetaSD's BD where q is one-hot).

    Args:
        ids: Proposed token ids [n].
        logits: Target logits [n, vocabulary] at their positions.

    Returns:
        float32 [n] in [0, 1].
    """
    return logits.float().softmax(dim=-1).gather(-1, ids[:, None])[:, 0]


def acceptance_probability(log_q: Tensor, vocabulary: Tensor | None, logits: Tensor) -> Tensor:
    """1 - TV between drafter and target at temperature 1, slot by slot (MetaSD's BD, HedgeSpec's gamma).

    Args:
        log_q: Drafter log-probabilities [n, draft vocabulary].
        vocabulary: Token ids of the columns [draft vocabulary], or None for all ids.
        logits: Target logits [n, vocabulary] at the same positions.

    Returns:
        float32 [n] in [0, 1].
    """
    return overlap(log_q, target_probabilities(logits, vocabulary))
