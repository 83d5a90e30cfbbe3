"""Pools of several sizes: drawn with the generalist, replayed as a plain loop over their prompts would."""

from __future__ import annotations

import numpy as np
import pytest
from test_replay_stage import acceptance

from draftpool.errors import DraftpoolError
from draftpool.replay.answers import lay_out
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.pool_sizes import drawn_pools, pool_size_table
from draftpool.selectors.base import make_selector

NAMES = list("abcdef")


def test_drawn_pools_differ_and_hold_the_generalist():
    pools = drawn_pools(NAMES, "c", 3, 5)
    assert len({tuple(pool) for pool in pools}) == 5
    assert all(len(pool) == 3 and "c" in pool and pool == sorted(pool) for pool in pools)
    assert drawn_pools(NAMES, "c", 3, 5) == pools
    assert drawn_pools(NAMES, "c", 6, 5) == [NAMES]
    assert len(drawn_pools(NAMES, "c", 2, 50)) == 5
    with pytest.raises(DraftpoolError, match="a pool of 7 drafters out of 6"):
        drawn_pools(NAMES, "c", 7, 1)


def test_table_equals_a_loop():
    table = acceptance(answers=3, tokens=20)
    cfg = {"drafters": ["a", "b", "c"], "sizes": [2, 3], "pools": 2, "seeds": 3, "selectors": ["ucb"]}
    made = pool_size_table(cfg, table, {"ucb": {"kind": "metasd_ucb"}}, "b", lambda: None)
    assert set(made["size"]) == {2, 3} and made.groupby("size").pool.nunique().to_dict() == {2: 2, 3: 1}
    for row in made.itertuples():
        pool = row.drafters.split(" ")
        answers = lay_out(table, pool)
        place = np.array([answers.frame.index[answers.frame.prompt_id == row.prompt_id][0]])

        def rounds(cfg: dict, seed: int, answers=answers, place=place, pool=pool, row=row) -> int:
            draws = EpisodeDraws([(seed, 0, row.prompt_id)], len(pool) + 1)
            return int(replay(make_selector(cfg, pool), answers, place, draws).rounds[0])

        assert row.rounds == pytest.approx(
            np.mean([rounds({"kind": "metasd_ucb"}, seed) for seed in range(3)])
        )
        assert row.best_fixed == min(rounds({"kind": "fixed", "arm": name}, 0) for name in pool)
        assert row.switching_rounds <= row.best_fixed
