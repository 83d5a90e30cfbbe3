"""The statistics stage: from tables of decoding, scoring and training to tidy CSVs and ``summary.json``.

Figures and tables read only what this stage writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from draftpool.analysis import comparisons, live, training_logs
from draftpool.analysis.bootstrap import Resampling, mean_interval, ratio_interval
from draftpool.analysis.controlled import controlled
from draftpool.analysis.headroom import headroom, replay_headroom, switching
from draftpool.analysis.metrics import (
    check_acceptance,
    per_prompt,
    position_rates,
    truncate,
    walk,
    without_unused,
)
from draftpool.analysis.regret import cumulative_regret, query_regret, regret_curves
from draftpool.analysis.replayed import replay_statistics
from draftpool.analysis.sessions import join_turns, with_sessions
from draftpool.analysis.summary import summarise
from draftpool.analysis.surrogate import rank_correlations
from draftpool.artefacts import atomic_dir, read_table, write_json, write_provenance
from draftpool.data.streams import HELD_OUT, MAIN
from draftpool.errors import DraftpoolError

ACCEPTANCE = [
    "prompt_id",
    "domain",
    "repeat",
    "drafter",
    "position",
    "left",
    "k",
    "accepted",
    "committed",
    "censored",
    "gamma",
    "modelled",
    "stream",
]

Tables = dict[str, pd.DataFrame]


def compute_stats(
    cfg: dict,
    acceptance: Sequence[Path],
    decodes: Sequence[Path],
    profiles: Sequence[Path],
    replays: Sequence[Path],
    training: dict[str, Path] | Sequence[Path],
    lossless: Path | None,
    responses: Sequence[Path],
    benchmarks: Sequence[Path],
    out: Path,
) -> None:
    """Compute every statistic of a study.

    Args:
        cfg: ``study, domains, drafters, pool, generalist, compare, temperature, sampled, bootstrap`` (see
            ``Plan.stats_cfg``).
        acceptance: Acceptance tables.
        decodes: Folders with ``steps.parquet`` and ``sequences.parquet``; empty for a study without live
            decoding.
        profiles: Folders with ``parts.csv``.
        replays: Folders of replay_selectors.
        training: Folders with ``training.csv``: by drafter run, or in the order of ``cfg["drafters"]``.
        lossless: Losslessness report.
        responses: Response tables, or the folders that hold ``responses.parquet``.
        benchmarks: Snakemake benchmark files named ``<stage>-<id>.tsv``.
        out: Folder to write: tidy CSVs (docs/metrics.md) and ``summary.json``.

    Raises:
        DraftpoolError: If a table breaks an identity, a float32 sequence differs from plain decoding, or
            inputs do not fit together.
    """
    resampling = Resampling(**cfg["bootstrap"])
    drafters = comparisons.drafter_table(cfg["drafters"])
    along = _read_acceptance(acceptance, drafters)
    # A drafter that remembers its stream has rows of every stream.
    everything = without_unused(along[along["stream"].isin(["", HELD_OUT])])
    check_acceptance(everything)
    # Prompt sets and domains outside the pool's are streams of their own: no mean over domains holds them.
    table = everything[everything["domain"].isin(cfg["domains"])]
    turns, by_turn = live.read_decodes([Path(folder) for folder in decodes])
    steps, sequences = join_turns(turns, by_turn) if len(by_turn) else (turns, by_turn)
    exact = live.exact_dtype(sequences) if len(sequences) else ""
    timed = live.timed_dtype(sequences) if len(sequences) else ""
    censored = (
        table.groupby("drafter", observed=True)["censored"].mean().rename("censored_share").reset_index()
    )
    tables = {"drafters": drafters.merge(censored.astype({"drafter": str}), on="drafter")}
    tables |= _scored(cfg, table, drafters, _read_responses(responses), resampling)
    tables |= _trained(cfg, training, drafters, resampling)
    if len(sequences):
        tables |= _decoded(cfg, steps, sequences, by_turn, along, exact, timed, resampling)
    own = by_turn[by_turn["stream"].map(cfg["stream_pools"]) == MAIN] if len(by_turn) else by_turn
    tables["headroom"] = _headroom(cfg, along, own, resampling)
    tables["tau_sets"], sets = _outside(cfg, everything, drafters, resampling)
    tables["tau_prompts"] = pd.concat([tables["tau_prompts"], sets])
    if replays:
        tables |= replay_statistics(cfg, replays, sequences, timed, resampling)
        named = set(tables["headroom"]["stream"])
        more = replay_headroom(tables["replay_queries"], named, resampling)
        tables["headroom"] = pd.concat([tables["headroom"], more], ignore_index=True)
    if profiles:
        tables["profile"] = pd.concat([pd.read_csv(folder / "parts.csv") for folder in profiles])
    tables["times"] = live.benchmark_times([Path(file) for file in benchmarks])
    summary = summarise(tables, lossless, exact, timed, resampling.confidence)
    with atomic_dir(out) as folder:
        for name, frame in tables.items():
            if len(frame):
                frame.to_csv(folder / f"{name}.csv", index=False)
        write_json(folder / "summary.json", summary)
        described = {
            key: cfg[key] for key in ("study", "domains", "pool", "pools", "stream_pools", "generalist")
        }
        described |= {"confidence": resampling.confidence, "exact_dtype": exact, "timed_dtype": timed}
        described |= {"costs_dtype": cfg["costs_dtype"]}
        write_json(folder / "meta.json", described)
        write_provenance(folder, cfg)


def _read_acceptance(files: Sequence[Path], drafters: pd.DataFrame) -> pd.DataFrame:
    if not files:
        raise DraftpoolError("no acceptance table given", "--acceptance", "score the pool first")
    table = pd.concat([read_table(Path(file), columns=ACCEPTANCE) for file in files], ignore_index=True)
    missing = set(drafters["drafter"]) - set(table["drafter"].unique())
    if missing:
        raise DraftpoolError(
            f"drafters never scored: {', '.join(sorted(missing))}", str(files[0]), "score the pool again"
        )
    # Categories make every later group-by on names an integer one.
    return table.astype(
        {"drafter": "category", "prompt_id": "category", "domain": "category", "stream": "category"}
    )


def _read_responses(paths: Sequence[Path]) -> pd.DataFrame:
    frames = []
    for path in map(Path, paths):
        file = path / "responses.parquet" if path.is_dir() else path
        frame = read_table(file, columns=["prompt_id", "domain", "response_ids", "finish", "repetition"])
        frames.append(frame.assign(n_tokens=frame["response_ids"].map(len)).drop(columns="response_ids"))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _scored(
    cfg: dict, table: pd.DataFrame, drafters: pd.DataFrame, responses: pd.DataFrame, resampling: Resampling
) -> Tables:
    domains = cfg["domains"]
    if len(responses):
        responses = responses[responses["domain"].isin(domains)]
    table = without_unused(table)
    runs = per_prompt(walk(table)).astype({"drafter": str, "prompt_id": str, "domain": str})
    recipes = comparisons.by_recipe(runs, drafters)
    taus = pd.concat(
        [
            comparisons.tau_statistics(runs, domains, "run", resampling),
            comparisons.tau_statistics(recipes, domains, "recipe", resampling),
        ],
        ignore_index=True,
    )
    correlations, points = rank_correlations(without_unused(table[table["modelled"]]), resampling)
    found = {
        "tau": taus,
        "tau_seeds": comparisons.seed_spread(taus, drafters),
        "tau_prompts": runs.assign(tau=runs["tokens"] / runs["rounds"]),
        "compare": comparisons.compare(recipes, cfg["compare"], domains, resampling),
        "specialists": comparisons.specialists(runs, drafters, cfg["generalist"], domains, resampling),
        "surrogate": correlations,
        "surrogate_prompts": points,
    }
    if len(responses):
        found["domains"] = comparisons.domain_statistics(
            responses, runs, cfg["generalist"], domains, resampling
        )
    return found


def _outside(
    cfg: dict, table: pd.DataFrame, drafters: pd.DataFrame, resampling: Resampling
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """tau of every drafter on every prompt set and domain outside the pool's, and the same by prompt."""
    table = without_unused(table[~table["domain"].isin(cfg["domains"])])
    if table.empty:
        return pd.DataFrame(), pd.DataFrame()
    runs = per_prompt(walk(table)).astype({"drafter": str, "prompt_id": str, "domain": str})
    rows = [
        {"drafter": drafter, "set": name}
        | ratio_interval(own["tokens"], own["rounds"], resampling).row("tokens/target call")
        for (drafter, name), own in runs.groupby(["drafter", "domain"])
    ]
    return pd.DataFrame(rows), runs.assign(tau=runs["tokens"] / runs["rounds"])


def _trained(
    cfg: dict, training: dict[str, Path] | Sequence[Path], drafters: pd.DataFrame, resampling: Resampling
) -> Tables:
    trained = [drafter for drafter in cfg["drafters"] if drafter["objective"] is not None]
    if not isinstance(training, dict):
        if training and len(training) != len(trained):
            raise DraftpoolError(
                f"{len(training)} training folders for {len(trained)} trained drafters",
                "--training",
                "give one a drafter",
            )
        training = {drafter["name"]: folder for drafter, folder in zip(trained, training, strict=False)}
    logs = training_logs.read_logs(training)
    found = {
        "training": training_logs.training_summary(logs),
        "training_dynamics": training_logs.training_dynamics(logs),
    }
    found["controlled"] = controlled(cfg, training)
    overhead = training_logs.dpace_overhead(logs, drafters, resampling)
    if overhead:
        found["overhead"] = pd.DataFrame([overhead.row("relative extra step time")])
    return found


def _decoded(
    cfg: dict,
    steps: pd.DataFrame,
    sequences: pd.DataFrame,
    by_turn: pd.DataFrame,
    table: pd.DataFrame,
    exact: str,
    timed: str,
    resampling: Resampling,
) -> Tables:
    found = {
        "selectors": live.selector_statistics(sequences, cfg["domains"], resampling),
        "time_split": live.time_split(steps, sequences, resampling),
        "arm_shares": live.arm_shares(steps, resampling),
        "position_rates": position_rates(steps),
    }
    # Texts under `rejection` depend on the drafter: rounds of different texts are not compared.
    same = ~by_turn["stream"].isin(by_turn.loc[by_turn["matches_plain"].isna(), "stream"])
    by_turn = by_turn[same]
    sequences, steps = (frame[frame["stream"].isin(by_turn["stream"])] for frame in (sequences, steps))
    found["mismatches"] = live.mismatches(by_turn)
    if by_turn.empty:
        return found
    # But for sampled prompt sets the acceptance table holds greedy texts; a sampled one has other anchors.
    if cfg.get("temperature", 0.0) > 0.0:
        table = table[table["domain"].isin(cfg["sampled"])]
    found["agreement"] = live.agreement(by_turn, table)
    # A half-precision text depends on the drafter, so its rounds are not comparable between arms.
    main = [stream for stream, pool in cfg["stream_pools"].items() if pool == MAIN]
    if exact == "float32" and cfg["pool"] and sequences["stream"].isin(main).any():
        # Streams of further pools have their regret from replay.
        by_turn, steps, sequences = (
            frame[frame["stream"].isin(main)] for frame in (by_turn, steps, sequences)
        )
        counted, seconds = sequences[sequences["dtype"] == exact], sequences[sequences["dtype"] == timed]
        turns = by_turn[by_turn["dtype"] == exact]
        switched = _switched(turns, table[table["drafter"].isin(cfg["pool"])])
        queries = query_regret(counted, cfg["pool"], switched)
        wall = query_regret(seconds, cfg["pool"], switched.iloc[:0], column="wall_time")
        drawn = queries[~queries["selector"].isin(["plain", *_pool_arms(cfg)])]
        shown = set(drawn["selector"])
        found["regret"] = _regret_means(queries, wall, cfg["domains"], resampling)
        found["regret_queries"] = queries
        found["regret_cumulative"] = cumulative_regret(drawn, resampling)
        curves = regret_curves(steps[steps["dtype"] == exact], counted, cfg["pool"], resampling)
        found["regret_tokens"] = curves[curves["selector"].isin(shown)]
    return found


def _pool_arms(cfg: dict) -> list[str]:
    """Fixed arms but for the generalist, which stands in the curves as the one-size-fits-all choice."""
    return [f"fixed:{drafter['name']}" for drafter in cfg["drafters"] if drafter["name"] != cfg["generalist"]]


def _switched(sequences: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Rounds of the best switching sequence, cut to the live length: stream, prompt_id, rounds."""
    frames = []
    for stream, group in sequences.groupby("stream", observed=True):
        lengths = group.drop_duplicates(["prompt_id", "repeat"])[["prompt_id", "repeat", "n_tokens"]]
        cut = truncate(without_unused(table[table["stream"].isin(["", stream])]), lengths)
        if len(cut):
            # A session's best sequence is that of its turns, one after the other.
            rounds = (
                with_sessions(switching(cut)).groupby(["session", "repeat"], observed=True)["rounds"].sum()
            )
            means = rounds.groupby("session", observed=True).mean().rename_axis("prompt_id").reset_index()
            frames.append(means.assign(stream=stream))
    return pd.concat(frames) if frames else pd.DataFrame(columns=["stream", "prompt_id", "rounds"])


def _regret_means(
    queries: pd.DataFrame, wall: pd.DataFrame, domains: list[str], resampling: Resampling
) -> pd.DataFrame:
    """Mean regret per query: columns stream, selector, scope, reference and the statistic's."""
    rows = []
    for frame, references, unit in (
        (queries, ("best_fixed", "pathwise", "switching"), "rounds/query"),
        (wall.rename(columns={"best_fixed": "best_fixed_seconds"}), ("best_fixed_seconds",), "s/query"),
    ):
        for (stream, selector), cell in frame.groupby(["stream", "selector"], observed=True):
            for scope in ("all", *domains):
                group = cell if scope == "all" else cell[cell["domain"] == scope]
                for reference in references:
                    values = group[reference].dropna()
                    if len(values):
                        head = {
                            "stream": stream,
                            "selector": selector,
                            "scope": scope,
                            "reference": reference,
                        }
                        rows.append({**head, **mean_interval(values, resampling).row(unit)})
    return pd.DataFrame(rows)


def _headroom(
    cfg: dict, table: pd.DataFrame, sequences: pd.DataFrame, resampling: Resampling
) -> pd.DataFrame:
    if not cfg["pool"]:
        return pd.DataFrame()
    pool = table[table["drafter"].isin({*cfg["pool"], cfg["generalist"]})].copy()
    pool["drafter"] = pool["drafter"].cat.remove_unused_categories()
    told = pool["domain"].isin(cfg["domains"]) & pool["stream"].isin(["", HELD_OUT])
    streams = {HELD_OUT: set(pool.loc[told, "prompt_id"])}
    if len(sequences):
        # A session is one query, which its turns are not: its stream's headroom comes from replay.
        alone = with_sessions(sequences)
        alone = alone[alone["session"] == alone["prompt_id"]]
        streams |= {
            stream: set(group["prompt_id"]) for stream, group in alone.groupby("stream", observed=True)
        }
    frames = []
    for stream, prompts in streams.items():
        # A drafter that remembers its stream has rows of every stream.
        own = without_unused(pool[pool["prompt_id"].isin(prompts) & pool["stream"].isin(["", stream])])
        if len(own):
            frames.append(headroom(own, cfg["generalist"], stream, resampling))
    return pd.concat(frames, ignore_index=True)
