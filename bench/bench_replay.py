"""Exact replay: rounds per second and core of every learner, on a synthetic table (only the speed counts)."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
from harness import Report, parser, run, spread

from draftpool.replay.answers import Answers
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.selectors.base import make_selector

ARMS, EPISODES, TOKENS, SLOTS = 8, 1000, 96, 7
LEARNERS = {
    "UCB": ({"kind": "metasd_ucb"}, 1_000_000),
    "EXP3": ({"kind": "exp3"}, None),
    "Hedge": ({"kind": "hedgespec", "learner": "hedge"}, 1_000_000),
    "NormalHedge": ({"kind": "hedgespec"}, 300_000),
    "Thompson": ({"kind": "thompson"}, None),
}


def synthetic(answers: int = 50) -> Answers:
    """Geometric acceptance with a rate per arm; every arm drafts SLOTS tokens."""
    rng = np.random.default_rng(0)
    rates = np.linspace(0.3, 0.7, ARMS)
    cells = answers * TOKENS
    left = np.tile(TOKENS - np.arange(TOKENS), answers)
    accepted = np.minimum(np.minimum(rng.geometric(1 - rates, (cells, ARMS)) - 1, SLOTS), left[:, None])
    gamma = np.broadcast_to(rates[:, None], (cells, ARMS, SLOTS)).astype(np.float32)
    frame = pd.DataFrame({"prompt_id": [str(a) for a in range(answers)]}).assign(
        domain="d", repeat=0, tokens=TOKENS
    )
    k = np.full(ARMS, SLOTS)
    bd = np.clip(rng.normal(rates, 0.1, (cells, ARMS)), 0.0, 1.0)
    need = np.minimum(accepted + 1, SLOTS).max(axis=1)
    names = tuple(f"drafter-{arm}" for arm in range(ARMS))
    return Answers(
        frame=frame,
        arms=names,
        k=k,
        tokens=np.full(answers, TOKENS),
        turn=np.zeros(cells, dtype=np.int64),
        left=left,
        available=np.ones((cells, ARMS), dtype=bool),
        drafted=np.full((cells, ARMS), SLOTS),
        accepted=accepted,
        committed=np.minimum(accepted + 1, left[:, None]),
        reward_bd=bd,
        reward_bd_full=np.full((cells, ARMS), np.nan),
        need=need,
        gamma=gamma,
    )


def main() -> None:
    """Time every learner; all share the draws, which are timed apart."""
    options = parser(__doc__).parse_args()
    report = Report("replay", options)
    answers = synthetic()
    which = np.arange(EPISODES) % len(answers.tokens)
    keys = [(episode // 50, 0, str(episode % 50)) for episode in range(EPISODES)]
    begin = time.perf_counter()
    uniforms = EpisodeDraws(keys, ARMS + 1)
    uniforms.round(TOKENS - 1)
    report.row(f"draws of {EPISODES} episodes", spread([time.perf_counter() - begin]), "s")
    for name, (cfg, bar) in LEARNERS.items():
        speeds = []
        for repeat in range(options.repeats + 1):
            begin = time.perf_counter()
            made = replay(make_selector(cfg, answers.arms), answers, which, uniforms)
            if repeat:
                speeds.append(int(made.rounds.sum()) / (time.perf_counter() - begin))
        note = f" (bar: at least {bar:,})" if bar else ""
        report.row(f"{name}{note}", spread(speeds), "rounds/s")
    report.finish()


if __name__ == "__main__":
    run(main)
