"""Stage replay_selectors: every selector, many seeds, on every stream, from the acceptance table and frozen costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from draftpool.analysis.sessions import with_sessions
from draftpool.artefacts import atomic_dir, read_json, read_table, write_provenance, write_table
from draftpool.data.streams import HELD_OUT, stream_prompts
from draftpool.decoding.cost_model import CostModel, load_costs
from draftpool.errors import DraftpoolError
from draftpool.progress import bar
from draftpool.replay.answers import lay_out
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.replay.oracles import best_switching_cost, best_switching_rounds, fixed_rounds, greedy_rounds
from draftpool.replay.pool_sizes import pool_size_table
from draftpool.replay.routes import load_routes
from draftpool.replay.tally import Tally
from draftpool.selectors.base import PLAIN, Bools, Context, Ints, Selector, arms_of, make_selector

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
    "drafted",
    "available",
    "modelled",
    "gamma_hard",
    "stream",
]
# Episodes played side by side: few enough for the processor's cache, many enough to hide Python.
CHUNK = 2000


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
        self.limit = limit
        self._draws: dict[tuple[int, int], EpisodeDraws] = {}

    def fit(self, positions: Ints) -> None:
        """Take out arms that have too few positions for a turn at its full length, as live decoding does.

        Args:
            positions: int[N], longest sequence that each arm can draft to its end.
        """
        answers = self.answers
        row = np.repeat(np.arange(len(answers.tokens)), answers.length)
        prompt = self.prompt_tokens[row, answers.turn]
        if self.limit is None:
            # Streams of full answers are not decoded live: their own length stands for the limit.
            longest = np.zeros(self.prompt_tokens.shape, dtype=np.int64)
            np.maximum.at(longest, (row, answers.turn), answers.left + 1)
            wanted = prompt + longest[row, answers.turn]
        else:
            wanted = prompt + self.limit
        self.answers = answers.without((wanted[:, None] > positions) & (answers.left > 0)[:, None])

    @cached_property
    def best_arms(self) -> Bools:
        """Arms that need the fewest rounds alone, bool[A, N]; plain decoding is none of them."""
        rounds = fixed_rounds(self.answers)
        return rounds == rounds[:, self.answers.k > 0].min(axis=1, keepdims=True)

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
        be = answers.accepted[cells] / answers.k_pool
        # Selectors count a round in which nothing was drafted as 0; plain decoding never drafts.
        nothing = (answers.drafted[cells] == 0) & (answers.k > 0)
        bd = np.where(nothing, 0.0, answers.reward_bd[cells])
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
        switching_seconds=best_switching_cost(
            committed, answers.by_left(costs.widths[answers.drafted + 1] + costs.draft, 0.0)
        )[rows],
    )


def prompt_lengths(responses: list[Path]) -> pd.DataFrame:
    """Prompt tokens by prompt or session, a column per turn."""
    answers = pd.concat([read_table(folder / "responses.parquet") for folder in responses])
    rows = with_sessions(answers.drop_duplicates("prompt_id"))
    rows = rows.assign(tokens=rows["prompt_ids"].map(len))
    return rows.pivot(index="session", columns="turn", values="tokens")


def memory_table(costs: Path, pool: list[str]) -> pd.DataFrame:
    """Bytes of every drafter of a pool, as profile_costs found them: drafter, weights, state (per token)."""
    sizes = read_json(costs / "costs.json")["memory"]
    return pd.DataFrame([{"drafter": name, **sizes[name]} for name in pool])


def replay_selectors(
    cfg: dict, acceptance: Path, costs: Path, responses: list[Path], routes: Path | None, out: Path
) -> None:
    """Write Parquet tables: answers, arms, curves (seeds averaged), oracles, rewards, memory and, if asked for,
    pool_sizes.

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
    sizes = cfg["pool_sizes"]
    drafters = [name for name in cfg["pool"] if name != PLAIN]
    read = drafters if sizes is None else list({*drafters, *sizes["drafters"]})
    table = with_sessions(read_table(acceptance, columns=COLUMNS, where=[("drafter", "in", read)]))
    lengths = prompt_lengths(responses)
    with_plain = tuple(cfg["pool"]) if PLAIN in cfg["pool"] else (*cfg["pool"], PLAIN)
    methods = {PLAIN: ({"kind": "plain"}, with_plain, 1)}
    methods |= {f"fixed:{name}": ({"kind": "fixed", "arm": name}, tuple(cfg["pool"]), 1) for name in drafters}
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
    extra = 0 if sizes is None else len(sizes["sizes"]) * sizes["pools"]
    with bar(len(methods) * len(cfg["streams"]) + extra, "replay", "selector") as shown:
        for name, options in cfg["streams"].items():
            # A drafter that remembers its stream has rows of every stream, the others have one row for all.
            own = table[table["stream"].isin(["", name])]
            prompts = stream_prompts(own, options)
            laid_out: dict[tuple[str, ...], tuple[Stream, CostModel]] = {}
            for method, (selector, arms, most) in methods.items():
                seeds = options["seeds"] if most is None else min(most, options["seeds"])
                if arms not in laid_out:
                    stream = Stream(name, prompts, own, arms, options["limit"], lengths)
                    model = load_costs(costs, arms, stream.answers.k)
                    stream.fit(model.positions)
                    laid_out[arms] = stream, model
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
            table = table[
                table["domain"].isin(cfg["streams"][HELD_OUT]["domains"])
                & table["stream"].isin(["", HELD_OUT])
            ]
            made = pool_size_table(sizes, table, cfg["selectors"], cfg["generalist"], lambda: shown.update(1))
            frames["pool_sizes"] = [made]
    frames["memory"] = [memory_table(costs, drafters)]
    with atomic_dir(out) as folder:
        for kind, parts in frames.items():
            write_table(folder / f"{kind}.parquet", pd.concat(parts, ignore_index=True))
        write_provenance(folder, cfg)
