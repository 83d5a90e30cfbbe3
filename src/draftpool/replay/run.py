"""Stage replay_selectors: every selector, many seeds, on every stream, from the acceptance table and frozen costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.metrics import rounds_to_go
from draftpool.analysis.sessions import with_sessions
from draftpool.artefacts import atomic_dir, read_table, write_provenance, write_table
from draftpool.data.streams import HELD_OUT, ordered
from draftpool.decoding.cost_model import CostModel, load_costs
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.replay.answers import Answers, lay_out
from draftpool.replay.costs import price
from draftpool.replay.engine import EpisodeDraws, Replayed, replay
from draftpool.replay.oracles import best_switching_cost, best_switching_rounds, greedy_rounds
from draftpool.replay.pool_sizes import pool_size_table
from draftpool.replay.routes import load_routes
from draftpool.selectors.base import PLAIN, Context, Ints, Selector, arms_of, make_selector

COLUMNS = [
    "prompt_id",
    "domain",
    "repeat",
    "drafter",
    "position",
    "left",
    "k",
    "accepted",
    "gamma",
    "reward_bd_full",
]
# Episodes played side by side: few enough for the processor's cache, many enough to hide Python.
CHUNK = 2000
# Share of the plays of all seeds in so many rounds that must be of a best arm (HedgeSpec's 90 % of the weight).
CONVERGED, WINDOW = 0.9, 10
# Numbers of tokens at which the curves of rounds are kept.
POINTS = 16


def stream_prompts(table: pd.DataFrame, stream: dict) -> list[str]:
    """Prompts (or sessions) of a stream in its order; the table holds every domain's held-out prompts in theirs.

    Raises:
        DraftpoolError: If a domain has too few scored prompts.
    """
    taken = []
    for domain in stream["domains"]:
        own = table.loc[table["domain"] == domain, "session"].drop_duplicates().tolist()
        wanted = stream["prompts_per_domain"] or max(1, len(own))
        if len(own) < wanted:
            raise DraftpoolError(
                f"only {len(own)} scored prompts of {domain}, {wanted} wanted",
                "replay",
                "raise score.prompts_per_domain or lower the stream's prompts_per_domain",
            )
        taken += own[:wanted]
    return ordered(taken, stream["order"], stream["seed"])


class Stream:
    """One stream laid out for the arms of a pool.

    Args:
        name: Of the stream.
        prompts: Prompts (or sessions) in order.
        table: Acceptance rows with their `session`.
        arms: Of the selectors; the layout depends on them.
        limit: Tokens of an answer, or None.
        lengths: Prompt tokens by prompt or session, a column per turn.
    """

    def __init__(
        self,
        name: str,
        prompts: list[str],
        table: pd.DataFrame,
        arms: tuple[str, ...],
        limit: int | None,
        lengths: pd.DataFrame,
    ):
        self.name = name
        self.answers = lay_out(table[table["session"].isin(prompts)], arms, limit)
        frame = self.answers.frame
        place = {prompt: index for index, prompt in enumerate(prompts)}
        self.index = frame["prompt_id"].astype(str).map(place).to_numpy(dtype=np.int64)
        self.prompt_tokens = lengths.loc[frame["prompt_id"].astype(str)].fillna(0).to_numpy(dtype=np.int64)
        self._draws: dict[tuple[int, int], EpisodeDraws] = {}

    def offers(self, selector: Selector) -> bool:
        """Whether the acceptance table holds the rewards that a selector reads."""
        if not selector.reads_bd_full:
            return True
        known = self.answers.left > 0
        drafts = self.answers.k > 0
        return bool(np.isfinite(self.answers.reward_bd_full[known][:, drafts]).all())

    def chunks(self, seeds: int) -> Iterator[tuple[Ints, Ints, EpisodeDraws]]:
        """Answers, seeds and draws of all episodes, longer answers apart from shorter ones."""
        by_length = np.argsort(self.answers.tokens, kind="stable")
        which = np.repeat(by_length, seeds)
        seed = np.tile(np.arange(seeds), len(by_length))
        for first in range(0, len(which), CHUNK):
            part = slice(first, first + CHUNK)
            if (seeds, first) not in self._draws:
                self._draws[seeds, first] = EpisodeDraws(
                    self.keys(which[part], seed[part]), len(self.answers.arms) + 1
                )
            yield which[part], seed[part], self._draws[seeds, first]

    def keys(self, which: Ints, seed: Ints) -> list[tuple[int, int, str]]:
        """Keys of the episodes' draws."""
        frame = self.answers.frame
        prompts, repeats = frame["prompt_id"].astype(str).to_numpy(), frame["repeat"].to_numpy()
        return [(int(s), int(repeats[row]), str(prompts[row])) for row, s in zip(which, seed, strict=True)]

    def context(self, costs: CostModel, routes: pd.DataFrame | None, which: Ints) -> Context:
        """Costs, and the routes of the episodes' prompts."""
        if routes is None:
            return Context(costs.rounds)
        prompts = self.answers.frame["prompt_id"].astype(str)
        own = routes.reindex(prompts)
        if own.isna().any(axis=None):
            raise DraftpoolError(
                "a prompt has no route", str(own.index[own.isna().any(axis=1)][0]), "run train_router again"
            )
        return Context(costs.rounds, {kind: own[kind].to_numpy(dtype=np.int64)[which] for kind in own})


def best_fixed_arms(answers: Answers) -> np.ndarray:
    """Arms that need the fewest rounds alone, bool[A, N]; plain decoding is none of them."""
    committed = answers.committed_by_left()
    rows = np.arange(len(answers.tokens)), answers.tokens
    rounds = np.stack([rounds_to_go(committed[:, arm])[rows] for arm in range(len(answers.arms))], axis=1)
    return rounds == rounds[:, answers.k > 0].min(axis=1, keepdims=True)


class Tally:
    """Sums of one selector's episodes per answer, over seeds."""

    def __init__(self, stream: Stream, costs: CostModel, selector: str, needs: str):
        self.stream, self.costs, self.selector, self.needs = stream, costs, selector, needs
        answers = stream.answers
        n = len(answers.tokens)
        longest = int(answers.tokens.max())
        self.grid = np.unique(np.linspace(1, longest, min(POINTS, longest)).round().astype(np.int64))
        self.sums = {
            name: np.zeros(n)
            for name in (
                "episodes",
                "rounds",
                "accepted",
                "zeros",
                "switches",
                "evaluated",
                "seconds",
                "evaluation_seconds",
                "catch_up_seconds",
            )
        }
        self.squares = np.zeros(n)
        self.arms = np.zeros((n, len(answers.arms)))
        self.best = best_fixed_arms(answers)
        self.played = np.zeros((2, n, longest))
        self.curve = np.zeros((n, len(self.grid)))
        self.reached = np.zeros((n, len(self.grid)))

    def add(self, played: Replayed, which: Ints) -> None:
        """Take episodes in."""
        answers = self.stream.answers
        there = played.arms >= 0
        rounds = there.sum(axis=0)
        switched = (played.arms[1:] != played.arms[:-1]) & there[1:]
        seconds = price(self.costs, played, answers, which, self.stream.prompt_tokens, self.needs)
        values = {
            "episodes": np.ones(len(which)),
            "rounds": rounds,
            "accepted": np.where(there, played.accepted, 0).sum(axis=0),
            "switches": switched.sum(axis=0),
            "evaluated": played.evaluated.sum(axis=0),
            "zeros": (played.accepted == 0).sum(axis=0),
            "seconds": seconds.total,
            "evaluation_seconds": seconds.evaluation,
            "catch_up_seconds": seconds.catch_up,
        }
        for name, value in values.items():
            self.sums[name] += np.bincount(which, weights=value, minlength=len(self.squares))
        self.squares += np.bincount(which, weights=rounds.astype(float) ** 2, minlength=len(self.squares))
        rows, cells = np.broadcast_to(which, there.shape)[there], played.arms[there]
        np.add.at(self.arms, (rows, cells), 1.0)
        place = rows * self.played.shape[2] + np.nonzero(there)[0]
        for kept, weights in zip(self.played, (None, self.best[rows, cells]), strict=True):
            kept += np.bincount(place, weights=weights, minlength=kept.size).reshape(kept.shape)
        done = np.where(there, played.committed, 0).cumsum(axis=0)
        for column, n in enumerate(self.grid):
            used = (done < n).sum(axis=0) + 1
            reached = answers.tokens[which] >= n
            self.curve[:, column] += np.bincount(
                which, weights=np.where(reached, used, 0), minlength=len(self.squares)
            )
            self.reached[:, column] += np.bincount(which, weights=reached, minlength=len(self.squares))

    def convergence(self) -> tuple[np.ndarray, np.ndarray]:
        """Rounds until nine of ten plays in the next ten rounds, over all seeds, are of a best fixed arm of the answer,
        and whether that is ever so.

        Where it is not, the rounds are those of the answer: censored at its end.
        """
        # A policy that takes turns plays a best arm in some round with all seeds, but not in ten.
        totals = np.pad(self.played.cumsum(axis=2), ((0, 0), (0, 0), (1, 0)))
        episodes, best = totals[:, :, WINDOW:] - totals[:, :, :-WINDOW]
        alive = self.played[0][:, WINDOW - 1 :] > 0
        there = alive & (best >= CONVERGED * episodes)
        reached = there.any(axis=1)
        rounds = self.sums["rounds"] / np.maximum(self.sums["episodes"], 1.0)
        return np.where(reached, there.argmax(axis=1) if there.shape[1] else 0.0, rounds), reached

    def frames(self) -> dict[str, pd.DataFrame]:
        """Tables `answers`, `arms` and `curves` of this selector on this stream, seeds averaged."""
        answers = self.stream.answers
        n = np.maximum(self.sums["episodes"], 1.0)
        head = answers.frame.assign(
            stream=self.stream.name, selector=self.selector, prompt_index=self.stream.index
        )
        means = {name: total / n for name, total in self.sums.items() if name != "episodes"}
        variance = np.maximum(self.squares / n - means["rounds"] ** 2, 0.0)
        converged, reached = self.convergence()
        table = head.assign(
            **means,
            rounds_sd=np.sqrt(variance),
            converged=converged,
            reached=reached,
            seeds=self.sums["episodes"].astype(int),
        )
        arms = pd.DataFrame(self.arms / n[:, None], columns=list(answers.arms))
        arms = head[["stream", "selector", "prompt_id", "domain", "repeat"]].join(arms)
        arms = arms.melt(
            id_vars=["stream", "selector", "prompt_id", "domain", "repeat"],
            var_name="arm",
            value_name="rounds",
        )
        with np.errstate(invalid="ignore"):
            curve = pd.DataFrame(self.curve / self.reached, columns=self.grid)
        curves = head[["stream", "selector", "prompt_id", "domain", "repeat"]].join(curve)
        curves = curves.melt(
            id_vars=["stream", "selector", "prompt_id", "domain", "repeat"], var_name="n", value_name="rounds"
        ).dropna()
        return {"answers": table, "arms": arms, "curves": curves.astype({"n": int})}


def play(
    name: str, cfg: dict, stream: Stream, costs: CostModel, routes: pd.DataFrame | None, seeds: int
) -> dict[str, pd.DataFrame]:
    """Replay one selector on one stream; one that carries state meets the prompts in order.

    Args:
        name: Of the selector.
        cfg: Its kind and parameters.
        stream: Laid out for its arms.
        costs: Of the same arms.
        routes: Arms by prompt, for routers.
        seeds: Selector seeds 0 .. seeds - 1.
    """
    selector = make_selector(cfg, stream.answers.arms)
    tally = Tally(stream, costs, name, selector.needs)
    if selector.carries:
        episodes = np.arange(seeds)
        for place, row in enumerate(np.argsort(stream.index, kind="stable")):
            which = np.full(seeds, row)
            draws = EpisodeDraws(stream.keys(which, episodes), len(stream.answers.arms) + 1)
            context = stream.context(costs, routes, which)
            played = replay(selector, stream.answers, which, draws, context, resumed=place > 0)
            tally.add(played, which)
        return tally.frames()
    for which, _, draws in stream.chunks(seeds):
        context = stream.context(costs, routes, which)
        tally.add(replay(selector, stream.answers, which, draws, context), which)
    return tally.frames()


def reward_moments(stream: Stream) -> pd.DataFrame:
    """Mean and variance of BE and BD over all anchors of every answer, per arm (MetaSD's feedback signal)."""
    answers = stream.answers
    frames = []
    for row, tokens in enumerate(answers.tokens):
        cells = slice(row * answers.length, row * answers.length + tokens)
        be, bd = answers.accepted[cells] / answers.k_pool, answers.reward_bd[cells]
        moments = {
            "be": be.mean(axis=0),
            "be_var": be.var(axis=0),
            "bd": bd.mean(axis=0),
            "bd_var": bd.var(axis=0),
        }
        frames.append(pd.DataFrame(moments | {"arm": answers.arms, "row": row}))
    made = pd.concat(frames, ignore_index=True)
    return answers.frame.assign(stream=stream.name).join(made.set_index("row")).reset_index(drop=True)


def oracles(stream: Stream, costs: CostModel) -> pd.DataFrame:
    """Per answer: rounds of the best switching sequence and of the longest draft of all, and cheapest seconds.

    `ensemble_seconds` charges all drafts and all verifications of every round; `switching_seconds` is the cost program
    with free catch-up, so that it is a bound.
    """
    answers = stream.answers
    committed = answers.committed_by_left()
    rows = np.arange(len(answers.tokens)), answers.tokens
    greedy = greedy_rounds(committed)[rows]
    return answers.frame.assign(
        stream=stream.name,
        switching_rounds=best_switching_rounds(committed)[rows],
        greedy_rounds=greedy,
        ensemble_seconds=greedy * (costs.draft.sum() + costs.verify.sum()),
        switching_seconds=best_switching_cost(committed, costs.verify + costs.draft)[rows],
    )


def prompt_lengths(responses: list[Path]) -> pd.DataFrame:
    """Prompt tokens by prompt or session, a column per turn."""
    answers = pd.concat([read_table(folder / "responses.parquet") for folder in responses])
    rows = with_sessions(answers.drop_duplicates("prompt_id"))
    rows = rows.assign(tokens=rows["prompt_ids"].map(len))
    return rows.pivot(index="session", columns="turn", values="tokens")


def replay_selectors(
    cfg: dict, acceptance: Path, costs: Path, responses: list[Path], routes: Path | None, out: Path
) -> None:
    """Write Parquet tables: answers, arms, curves (seeds averaged), oracles, rewards and, if asked for, pool_sizes.

    Args:
        cfg: `pool`, `homes` (domain of every specialist), `generalist`, `selectors` (name -> kind and parameters),
            `few` (names replayed with at most `few_seeds`), `streams` (name -> domains, prompts_per_domain, order,
            seed, limit, and selector seeds `seeds`), `pool_sizes` (or None).
        acceptance: The acceptance table.
        costs: Folder of `costs.json`.
        responses: Held-out response folders (prompt lengths).
        routes: Folder of train_router, if there are routers.
        out: Folder to write.

    Raises:
        DraftpoolError: If the table or the costs belong to another pool.
    """
    table = read_table(acceptance, columns=COLUMNS)
    table = with_sessions(table)
    lengths = prompt_lengths(responses)
    methods = {PLAIN: ({"kind": "plain"}, (*cfg["pool"], PLAIN), 1)}
    methods |= {
        f"fixed:{name}": ({"kind": "fixed", "arm": name}, tuple(cfg["pool"]), 1) for name in cfg["pool"]
    }
    for name, selector in cfg["selectors"].items():
        seeds = cfg["few_seeds"] if name in cfg["few"] else None
        methods[name] = (selector, arms_of(selector, cfg["pool"]), seeds)
    routed = None
    if routes is not None:
        routed = load_routes(routes, cfg["homes"], tuple(cfg["pool"]), cfg["generalist"])
    frames: dict[str, list[pd.DataFrame]] = {
        "answers": [],
        "arms": [],
        "curves": [],
        "oracles": [],
        "rewards": [],
    }
    sizes = cfg["pool_sizes"]
    extra = 0 if sizes is None else len(sizes["sizes"]) * sizes["pools"]
    with bar(len(methods) * len(cfg["streams"]) + extra, "replay", "selector") as shown:
        for name, options in cfg["streams"].items():
            prompts = stream_prompts(table, options)
            laid_out: dict[tuple[str, ...], tuple[Stream, CostModel]] = {}
            for method, (selector, arms, most) in methods.items():
                seeds = options["seeds"] if most is None else min(most, options["seeds"])
                if arms not in laid_out:
                    stream = Stream(name, prompts, table, arms, options["limit"], lengths)
                    laid_out[arms] = stream, load_costs(costs, arms, stream.answers.k)
                stream, model = laid_out[arms]
                if not stream.offers(make_selector(selector, arms)):
                    print(f"{method} is left out on {name}: not every draft was read there", flush=True)
                    shown.update(1)
                    continue
                for kind, frame in play(method, selector, stream, model, routed, seeds).items():
                    frames[kind].append(frame)
                shown.update(1)
            pool, model = laid_out[tuple(cfg["pool"])]
            frames["oracles"].append(oracles(pool, model))
            frames["rewards"].append(reward_moments(pool))
        if sizes is not None:
            table = table[table["domain"].isin(cfg["streams"][HELD_OUT]["domains"])]
            made = pool_size_table(sizes, table, cfg["selectors"], cfg["generalist"], lambda: shown.update(1))
            frames["pool_sizes"] = [made]
    with atomic_dir(out) as folder:
        for kind, parts in frames.items():
            write_table(folder / f"{kind}.parquet", pd.concat(parts, ignore_index=True))
        write_provenance(folder, cfg)
