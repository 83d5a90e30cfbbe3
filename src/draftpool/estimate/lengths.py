"""How many texts of which length a study has; lengths are assumed, numbers of texts are those of the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftpool.config.prompt_sets import Sampled, Sessions

if TYPE_CHECKING:
    from draftpool.config.plan import Plan


@dataclass(frozen=True)
class Lengths:
    """Assumed mean lengths, in tokens.

    Attributes:
        answer_share, prompt_share: Means as shares of the limits in the configuration, as measured.
        answer, prompt: Means where the limits are far off: no text is taken to be longer.
    """

    answer_share: float
    prompt_share: float
    answer: float
    prompt: float

    def answer_tokens(self, limit: int) -> float:
        """Mean length of an answer of at most ``limit`` tokens."""
        return min(self.answer, self.answer_share * limit)

    def prompt_tokens(self, limit: int) -> float:
        """Mean length of a prompt of at most ``limit`` tokens."""
        return min(self.prompt, self.prompt_share * limit)


@dataclass(frozen=True)
class Texts:
    """Answered texts.

    Attributes:
        queries: Prompts or sessions.
        answers: Texts; every turn of a session is one.
        prompt: Mean tokens before an answer, earlier turns among them.
        answer: Mean tokens of an answer.
    """

    queries: float
    answers: float
    prompt: float
    answer: float

    @property
    def prompt_tokens(self) -> float:
        """Tokens of all prompts."""
        return self.answers * self.prompt

    @property
    def answer_tokens(self) -> float:
        """Tokens of all answers."""
        return self.answers * self.answer

    @property
    def anchors(self) -> float:
        """Places of all answers at which something can be drafted."""
        return self.answers * max(0.0, self.answer - 1)

    @property
    def kept_tokens(self) -> float:
        """Tokens whose taps are kept: all but the last of each answer."""
        return self.prompt_tokens + self.anchors


def texts_of(
    plan: Plan, name: str, split: str, lengths: Lengths, wanted: int | None = None, limit: int | None = None
) -> Texts:
    """Texts of a domain's split or of a prompt set.

    Args:
        plan: The study.
        name: Domain or prompt set.
        split: `train` or `eval`.
        lengths: Assumed lengths.
        wanted: Queries taken at most (of every base domain in a sampled or reworded set, as streams do: of the set).
        limit: Longest answer; None for that of `responses`.
    """
    study = plan.study
    options, longest = study.prompt_sets.get(name), limit or study.responses.max_new_tokens
    prompt = lengths.prompt_tokens(study.responses.max_prompt_tokens)
    answer = lengths.answer_tokens(longest)
    if options is None:
        count = study.domains[name].train if split == "train" else study.domains[name].eval
        queries = count if wanted is None else min(wanted, count)
        return Texts(queries, queries, prompt, answer)
    domains = len(plan.prompt_sets[name].cfg["domains"])
    count = options.prompts_per_domain * domains
    if isinstance(options, Sessions):
        answer = lengths.answer_tokens(limit or study.decode.max_new_tokens)
        sessions = options.prompts_per_domain * (domains // options.turns)
        queries = sessions if wanted is None else min(wanted, sessions)
        # Turn t holds the t turns before it and their answers.
        before = (options.turns - 1) / 2 * (prompt + answer)
        return Texts(queries, queries * options.turns, prompt + before, answer)
    queries = count if wanted is None else min(wanted, count)
    repeats = options.repeats if isinstance(options, Sampled) else 1
    return Texts(queries, queries * repeats, prompt, answer)


def joined(texts: Iterable[Texts]) -> Texts:
    """All of these together, lengths averaged over answers."""
    texts = list(texts)
    queries, answers = sum(one.queries for one in texts), sum(one.answers for one in texts)
    if not answers:
        return Texts(0, 0, 0.0, 0.0)
    prompt = sum(one.prompt_tokens for one in texts) / answers
    return Texts(queries, answers, prompt, sum(one.answer_tokens for one in texts) / answers)
