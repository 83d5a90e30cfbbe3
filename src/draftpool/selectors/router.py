"""Static routers: a classifier reads the prompt once and its drafter writes the whole answer."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from draftpool.errors import DraftpoolError
from draftpool.selectors.base import Bools, Feedback, Floats, Ints, Parameters, Selector, register_selector


@register_selector("router")
class Router(Selector):
    """The arm of the prompt's predicted domain, in every round (`replay/router.py` trains the classifier)."""

    ignores_availability: ClassVar[bool] = True
    needs: ClassVar[Literal["bandit", "full"]] = "bandit"

    class Params(Parameters):
        """`features`: `tfidf` (words of the prompt) or `hidden` (the target's mean hidden state)."""

        features: Literal["tfidf", "hidden"] = "tfidf"

    def start(self) -> None:
        """Look the episodes' routes up.

        Raises:
            DraftpoolError: If the context has none, or one that is no arm.
        """
        routes = (self.context.routes or {}).get(self.params.features)
        if routes is None or np.shape(routes) != (self.episodes,):
            raise DraftpoolError(
                f"no route per prompt by {self.params.features} features",
                self.where,
                "train the router first",
            )
        self._routes = np.asarray(routes, dtype=np.int64)
        if ((self._routes < 0) | (self._routes >= self.n_arms)).any():
            raise DraftpoolError(
                "a route leads to no arm of the pool", self.where, "route among the pool's drafters"
            )

    def choose(self, t: int, available: Bools, draws: Floats) -> tuple[Ints, Floats]:
        """The route, with certainty."""
        return self._routes, np.ones(self.episodes)

    def learn(self, arms: Ints, feedback: Feedback) -> None:
        """Nothing to learn."""
