"""The protocol of all selectors, and how one is built from its configuration.

A selector plays S independent episodes (one episode = one prompt under one seed) in lockstep: replay passes
thousands, live decoding passes one. S, N and K below are the number of episodes, of arms and the pool's
longest draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from draftpool.errors import DraftpoolError
from draftpool.registry import load_registered, validate_parameters

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The arm that drafts nothing.
PLAIN = "plain"
PACKAGE = "draftpool.selectors"
DECORATOR = "register_selector"


class Parameters(BaseModel):
    """Base of a selector's parameters: strict types, unknown names refused, frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclass(frozen=True)
class Completed:
    """Full-information losses that became known in this round, in order of completion.

    The caller holds a round's losses back until all N are known; a round that was not evaluated never
    appears.

    Attributes:
        episode: int[m], whose loss.
        round: int[m], the round whose anchor was evaluated (at most the present one).
        loss: float[m, N] in [0, 1]: 1 - (a + 1) / (K + 1), a being what the arm would have had accepted.
        gamma: float[m, N, K], acceptance probability of every slot (0 beyond an arm's own draft), or None
            if the selector does not read it.
    """

    episode: Ints
    round: Ints
    loss: Floats
    gamma: Floats | None = None


@dataclass(frozen=True)
class FirstSlots:
    """What every arm's first slot met in a round that was evaluated; known at once.

    Attributes:
        evaluated: bool[S], episodes whose arms were all evaluated in this round.
        hit: bool[S, N], the first proposed token is the target's.
        gamma: float[S, N], its acceptance probability, or None if the selector does not read it.
    """

    evaluated: Bools
    hit: Bools
    gamma: Floats | None = None


@dataclass(frozen=True)
class Context:
    """What a selector may know besides its feedback.

    Attributes:
        costs: float[N], modelled seconds of a round with each arm (the frozen artefact of `profile_costs`).
        routes: a router's arm per episode, int[S], by the router's features.
    """

    costs: Floats | None = None
    routes: Mapping[str, Ints] | None = None


@dataclass(frozen=True)
class Feedback:
    """What one round brought, for every episode; rows of finished episodes are ignored.

    Attributes:
        accepted: int[S], draft tokens accepted, after trimming at the end of the text.
        drafted: int[S], draft tokens proposed; 0 for plain decoding.
        committed: int[S], tokens committed.
        reward_be: float[S], accepted / K, 0 when nothing was drafted.
        reward_bd: float[S], mean acceptance probability of the slots up to and including the first reject; NaN
            (counts as 0) when nothing was drafted.
        reward_bd_full: float[S], the same over all drafted slots (MetaSD's letter), or None if it is not read.
        active: bool[S], episodes that took part in this round.
        completed: losses of selectors that need full information, else None.
        first: first slots, for selectors that read them, else None.
    """

    accepted: Ints
    drafted: Ints
    committed: Ints
    reward_be: Floats
    reward_bd: Floats
    active: Bools
    completed: Completed | None = None
    first: FirstSlots | None = None
    reward_bd_full: Floats | None = None


class Selector(ABC):
    """Chooses one arm per round in S independent episodes.

    Callers use `reset`, `select` and `update`, which check what passes through; a family implements `start`,
    `choose` and `learn`. Rewards and losses are on [0, 1].

    Args:
        arms: names of the N arms, in the order of every array.
        parameters: fields of the class's `Params`; anything else raises DraftpoolError.
    """

    kind: ClassVar[str] = ""
    needs: ClassVar[Literal["bandit", "full"]]
    #: Whether plain decoding is an arm beside the pool (kinds that weigh costs).
    plays_plain: ClassVar[bool] = False
    #: Whether its one arm is played whatever is offered: a drafter with too few positions then drafts nothing.
    ignores_availability: ClassVar[bool] = False
    Params: ClassVar[type[Parameters]] = Parameters

    def __init__(self, arms: Sequence[str], /, **parameters: Any) -> None:
        self.where = f"selector {self.kind or type(self).__name__}"
        self.arms = tuple(arms)
        if not self.arms or len(set(self.arms)) != len(self.arms):
            raise DraftpoolError(
                f"arms {list(arms)} are empty or not unique", self.where, "name each arm once"
            )
        self.params = validate_parameters(self.Params, parameters, self.where)

    @property
    def reads_bd(self) -> bool:
        """Whether the BD reward is read; live decoding charges its computation only then."""
        return getattr(self.params, "reward", None) in ("bd", "bd_full")

    @property
    def reads_bd_full(self) -> bool:
        """Whether BD over all drafted slots is read; in replay it needs extra passes of the target (score_pool)."""
        return getattr(self.params, "reward", None) == "bd_full"

    @property
    def reads_gamma(self) -> bool:
        """Whether the acceptance probabilities of all arms are read (soft estimators)."""
        return False

    @property
    def reads_first(self) -> bool:
        """Whether `Feedback.first` is read (token losses)."""
        return False

    @property
    def reads_prefill(self) -> bool:
        """Whether losses come from one-step acceptance at every committed token (HedgeSpec as published)."""
        return False

    @property
    def carries(self) -> bool:
        """Whether what was learnt passes from one query to the next; such queries are played in order."""
        return False

    def reset(self, n_arms: int, k: Ints, episodes: int, context: Context | None = None) -> None:
        """Forget everything and begin `episodes` new episodes.

        Args:
            n_arms: N, as many as there are names.
            k: int[N], tokens each arm drafts per round; 0 for plain decoding.
            episodes: S.
            context: What some selectors need besides.

        Raises:
            DraftpoolError: wrong shapes, or a context that lacks what the selector needs.
        """
        self.context = context or Context()
        self.k = np.asarray(k, dtype=np.int64)
        if n_arms != len(self.arms) or self.k.shape != (n_arms,) or (self.k < 0).any() or episodes < 1:
            raise DraftpoolError(
                f"reset with {n_arms} arms, k = {self.k.tolist()} and {episodes} episodes",
                self.where,
                f"pass one draft length >= 0 for each of {list(self.arms)} and at least one episode",
            )
        self.n_arms = n_arms
        self.episodes = episodes
        self.rows = np.arange(episodes)
        self.start()

    def resume(self) -> None:
        """Begin the next query of the same episodes; what `carries` says is kept, else all is forgotten."""
        self.start()

    def evaluates(self, t: int) -> Bools:
        """Whether all arms are evaluated in round t, bool[S]; asked after `select`, if `needs` is full."""
        return np.full(self.episodes, self.needs == "full")

    def select(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """Choose an arm for every episode.

        Args:
            t: rounds played so far in each running episode, 0 in the first.
            available: bool[S, N]; False arms are never chosen. Finished episodes need a True as well.
            draws: float64[S, N + 1], uniform on (0, 1): column 0 samples the arm, the others give random
                orders and ties.

        Returns:
            arms int64[S] and propensity float64[S]: the probability of that arm given the episode's past
                (exact for a fixed set of available arms).

        Raises:
            DraftpoolError: wrong shapes, an episode without an available arm, or an arm chosen that is not
                available.
        """
        if available.shape != (self.episodes, self.n_arms) or draws.shape != (self.episodes, self.n_arms + 1):
            raise DraftpoolError(
                f"available {available.shape} and draws {draws.shape}",
                self.where,
                f"pass ({self.episodes}, {self.n_arms}) and ({self.episodes}, {self.n_arms + 1})",
            )
        everything = self.ignores_availability or bool(available.all())
        if not everything and not available.any(axis=1).all():
            episode = int(np.argmin(available.any(axis=1)))
            raise DraftpoolError(
                f"no arm is available in episode {episode}, round {t}",
                self.where,
                "offer at least one arm, e.g. plain",
            )
        arms, propensity = self.choose(t, available, draws)
        if everything:
            return arms, propensity
        offered = available[self.rows, arms]
        if not offered.all():
            arm = self.arms[int(arms[np.argmin(offered)])]
            raise DraftpoolError(
                f"arm {arm!r} is not available in round {t}", self.where, "choose among available arms"
            )
        return arms, propensity

    def update(self, arms: Ints, feedback: Feedback) -> None:
        """Learn from the round just played; rows whose `feedback.active` is False change nothing.

        Args:
            arms: int[S] as returned by `select`.

        Raises:
            DraftpoolError: a reward or loss of an active episode is not finite or not in [0, 1].
        """
        if arms.shape != (self.episodes,) or feedback.active.shape != (self.episodes,):
            raise DraftpoolError(
                f"arms {arms.shape} and active {feedback.active.shape}",
                self.where,
                f"pass ({self.episodes},) for both",
            )
        self.learn(arms, feedback)

    def table(self, value: float = 0.0) -> Floats:
        """A state [S, N] of one value, laid out arm after arm: reductions over arms are several times faster."""
        return np.full((self.episodes, self.n_arms), value, order="F")

    @abstractmethod
    def start(self) -> None:
        """Set the state of S fresh episodes; `n_arms`, `k`, `episodes` and `rows` (0..S-1) are set."""

    @abstractmethod
    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """Arms int64[S] and propensities float64[S]; arguments as in `select`, already checked."""

    @abstractmethod
    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Take in one round; arguments as in `update`."""

    def rewards(self, feedback: Feedback, reward: Literal["be", "bd", "bd_full"]) -> Floats:
        """Rewards of the round, float64[S], checked by `check_unit`; NaN is 0 if nothing was drafted."""
        values = getattr(feedback, f"reward_{reward}")
        values = np.where((feedback.drafted == 0) & np.isnan(values), 0.0, values)
        self.check_unit(f"reward_{reward}", values, feedback.active)
        return values

    def check_unit(self, name: str, values: Floats, used: Bools) -> None:
        """Raise DraftpoolError, naming the first offender, unless `values` are in [0, 1] where `used`."""
        # NaN fails the quick look as well; unused rows may hold anything.
        if values.size == 0 or (values.min() >= 0.0 and values.max() <= 1.0):
            return
        bad = used & ~((values >= 0.0) & (values <= 1.0))
        if bad.any():
            raise DraftpoolError(
                f"{name} = {float(values[bad][0])!r} is not in [0, 1]",
                self.where,
                "scale rewards and losses to [0, 1] before they reach a selector",
            )


def sample_arms(weights: Floats, uniform: Floats) -> tuple[Ints, Floats]:
    """Sample an arm per row in proportion to `weights` [S, N] with `uniform` [S]; arms and propensity."""
    cumulative = np.cumsum(weights, axis=1)
    total = cumulative[:, -1]
    # Rounding may lift uniform * total to the total itself; below it, the arm found has a positive weight.
    threshold = np.minimum(uniform * total, np.nextafter(total, 0.0))
    arms = np.count_nonzero(cumulative <= threshold[:, None], axis=1)
    return arms, weights[np.arange(len(arms)), arms] / total


def best_arms(scores: Floats, previous: Ints, keys: Floats) -> tuple[Ints, Floats]:
    """Arms of the highest score; arms and propensity.

    Args:
        scores: float64[S, N], -inf for arms that are out.
        previous: int64[S], the arm played last (-1: none). It wins a tie, which saves a switch.
        keys: float64[S, N], uniform draws; the smallest wins a tie in which `previous` is not.
    """
    rows = np.arange(len(scores))
    tied = scores == scores.max(axis=1, keepdims=True)
    stay = (previous >= 0) & tied[rows, previous]
    arms = np.where(stay, previous, np.argmin(np.where(tied, keys, np.inf), axis=1))
    return arms, np.where(stay, 1.0, 1.0 / tied.sum(axis=1))


SelectorClass = TypeVar("SelectorClass", bound=type[Selector])


def register_selector(kind: str) -> Callable[[SelectorClass], SelectorClass]:
    """Class decorator: make the class known as `kind` (a literal string; found by scanning the sources)."""

    def mark(cls: SelectorClass) -> SelectorClass:
        cls.kind = kind
        return cls

    return mark


def arms_of(selector: Mapping[str, Any], pool: Sequence[str]) -> tuple[str, ...]:
    """Arms that a configured selector chooses from: the pool, and plain decoding if its kind weighs costs."""
    cls = load_registered(PACKAGE, DECORATOR, selector["kind"])
    return (*pool, PLAIN) if cls.plays_plain and PLAIN not in pool else tuple(pool)


def make_selector(cfg: Mapping[str, Any], arms: Sequence[str]) -> Selector:
    """Build a selector.

    Args:
        cfg: ``{"kind": "metasd_ucb", "reward": "bd", "beta": 0.25}``: the kind and its parameters.
        arms: names of the pool's arms.

    Raises:
        DraftpoolError: unknown kind or parameter (the message lists what exists), value out of range, unknown
            arm.
    """
    parameters = {key: value for key, value in cfg.items() if key != "kind"}
    if not isinstance(cfg.get("kind"), str):
        raise DraftpoolError(f"no kind in {dict(cfg)}", "selectors", "write e.g. kind: metasd_ucb")
    return load_registered(PACKAGE, DECORATOR, cfg["kind"])(arms, **parameters)
