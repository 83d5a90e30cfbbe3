"""Regret against the number of drafters: selectors replayed on pools drawn from all scored drafters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from draftpool import draws
from draftpool.errors import DraftpoolError
from draftpool.replay.answers import lay_out
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.oracles import best_switching_rounds, fixed_rounds
from draftpool.selectors.base import make_selector


def drawn_pools(drafters: list[str], generalist: str, size: int, pools: int) -> list[list[str]]:
    """Different pools of one size, the generalist in each, in the drafters' order; fewer if there are not as many.

    Raises:
        DraftpoolError: If there are not enough drafters.
    """
    others = [name for name in drafters if name != generalist]
    if size - 1 > len(others):
        raise DraftpoolError(
            f"a pool of {size} drafters out of {len(drafters)}",
            "config key `replay.pool_sizes.sizes`",
            "lower it or train more drafters",
        )
    found: list[list[str]] = []
    for attempt in range(20 * pools):
        chosen = draws.generator("pool", size, attempt).permutation(len(others))[: size - 1]
        pool = [name for name in drafters if name == generalist or name in {others[i] for i in chosen}]
        if pool not in found:
            found.append(pool)
        if len(found) == pools:
            break
    return found


def pool_size_table(
    cfg: dict, table: pd.DataFrame, selectors: dict[str, dict], generalist: str, shown: Callable[[], object]
) -> pd.DataFrame:
    """Replay selectors on pools of several sizes, on all scored prompts.

    Args:
        cfg: `drafters` (candidates), `sizes`, `pools` (of each size), `seeds`, `selectors` (names).
        table: Acceptance rows.
        selectors: Name -> kind and parameters.
        generalist: In every pool.
        shown: Called after every pool.

    Returns:
        Columns size, pool (number), drafters, selector, prompt_id, domain, rounds (mean over seeds and repeats),
        best_fixed (fewest rounds of a fixed drafter of that pool), switching_rounds.
    """
    frames = []
    for size in cfg["sizes"]:
        for number, pool in enumerate(drawn_pools(cfg["drafters"], generalist, size, cfg["pools"])):
            answers = lay_out(table, pool)
            committed = answers.committed_by_left()
            rows = np.arange(len(answers.tokens)), answers.tokens
            fixed = fixed_rounds(answers)
            head = answers.frame[["prompt_id", "domain"]].assign(
                size=size,
                pool=number,
                drafters=" ".join(pool),
                switching_rounds=best_switching_rounds(committed)[rows],
            )
            # i* minimises the mean over repeats of a prompt.
            means = pd.DataFrame(fixed).groupby(head["prompt_id"].astype(str)).mean().min(axis=1)
            head = head.assign(best_fixed=head["prompt_id"].astype(str).map(means))
            which = np.repeat(np.arange(len(answers.tokens)), cfg["seeds"])
            seeds = np.tile(np.arange(cfg["seeds"]), len(answers.tokens))
            prompts, repeats = answers.frame["prompt_id"].astype(str), answers.frame["repeat"]
            keys = [
                (int(seed), int(repeats[row]), prompts[row]) for row, seed in zip(which, seeds, strict=True)
            ]
            uniforms = EpisodeDraws(keys, size + 1)
            for name in cfg["selectors"]:
                played = replay(make_selector(selectors[name], pool), answers, which, uniforms)
                rounds = played.rounds.reshape(len(answers.tokens), cfg["seeds"]).mean(axis=1)
                frames.append(head.assign(selector=name, rounds=rounds))
            shown()
    made = pd.concat(frames, ignore_index=True)
    keys = ["size", "pool", "drafters", "selector", "prompt_id", "domain"]
    return (
        made.groupby(keys, observed=True)[["rounds", "best_fixed", "switching_rounds"]].mean().reset_index()
    )
