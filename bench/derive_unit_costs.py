"""Derive what `draftpool plan` multiplies counts with from a finished study: seconds, bytes and lengths per unit.

    python bench/derive_unit_costs.py RESULTS --machine "PROCESSOR, CORES" --out src/draftpool/estimate/measured.json

RESULTS is the `results/` folder of a finished run of the default study on a CPU. Nothing is typed by hand: times are
those of `RESULTS/benchmarks`, counts and bytes those of the study's artefacts. Dry runs are timed here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from draftpool.artefacts import read_json, write_json
from draftpool.config.load import load
from draftpool.config.plan import Plan
from draftpool.data.streams import session_of
from draftpool.estimate.command import estimate_study
from draftpool.estimate.counts import count_work
from draftpool.estimate.lengths import Lengths
from draftpool.estimate.world import World
from draftpool.selectors.base import PLAIN

DRY_RUNS = 3
FOLDERS = {
    "fetch_target": "targets",
    "prepare_prompts": "prompts",
    "prepare_set": "prompts",
    "generate_responses": "responses",
    "train_drafter": "drafters",
    "make_drafter": "drafters",
    "check_lossless": "lossless",
    "score_pool": "scores",
    "decode_live": "decodes",
    "profile_decode": "profiles",
    "profile_costs": "costs",
    "train_router": "routes",
    "replay_selectors": "replays",
}


def size(path: Path) -> int:
    """Bytes of a file or folder."""
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def found_ids(results: Path, stage: str, slugs: set[str]) -> list[str]:
    """Artefacts of a stage that have a benchmark, oldest first; ids of other commits differ in their hash only."""
    benchmarks = sorted(results.glob(f"benchmarks/{stage}-*.tsv"), key=lambda path: path.stat().st_mtime)
    ids = [path.stem.removeprefix(f"{stage}-") for path in benchmarks]
    return [id for id in ids if (results / FOLDERS[stage] / id).exists() and id.rsplit("-", 1)[0] in slugs]


def seconds(results: Path, stage: str, ids: list[str]) -> tuple[float, float]:
    """Wall-clock seconds of all jobs, and the largest memory of their own in bytes."""
    tables = [pd.read_csv(results / "benchmarks" / f"{stage}-{id}.tsv", sep="\t") for id in ids]
    return float(sum(t["s"].iloc[0] for t in tables)), float(
        max(t["max_uss"].iloc[0] for t in tables)
    ) * 2**20


def measured_lengths(results: Path, plan: Plan, ids: list[str]) -> Lengths:
    """Means of prompts and answers of domains, as shares of their limits."""
    study, prompts, answers, texts = plan.study, 0, 0, 0
    for id in ids:
        if id.rsplit("-", 2)[0] not in study.domains:
            continue
        table = pd.read_parquet(results / "responses" / id / "responses.parquet")
        prompts += int(table["prompt_ids"].map(len).sum())
        answers += int(table["response_ids"].map(len).sum())
        texts += len(table)
    limits = study.responses
    return Lengths(
        answers / texts / limits.max_new_tokens,
        prompts / texts / limits.max_prompt_tokens,
        answers / texts,
        prompts / texts,
    )


def tau_by_kind(sequences: pd.DataFrame, plan: Plan) -> dict[str, float]:
    """Tokens per target call of drafters alone, by kind."""
    fixed = sequences[sequences["selector"].str.startswith("fixed:")]
    kind = fixed["selector"].str.removeprefix("fixed:").map(lambda name: plan.runs[name].kind)
    sums = fixed.groupby(kind)[["n_tokens", "rounds"]].sum()
    return {name: float(row.n_tokens / row.rounds) for name, row in sums.iterrows()}


def derive(results: Path, machine: str) -> dict:
    """Every unit cost of the study."""
    plan = Plan(load(results / "default" / "resolved.yaml"))
    by_stage = plan.by_stage()
    ids = {}
    for stage in FOLDERS:
        slugs = {id.rsplit("-", 1)[0] for id in by_stage[stage]}
        ids[stage] = found_ids(results, stage, slugs)
    # Of artefacts that later runs made again under other ids, those of the plan's numbers: the newest.
    for stage, made in by_stage.items():
        if stage in ids and len(ids[stage]) > len(made):
            ids[stage] = [id for id in ids[stage] if id in made] or ids[stage][-len(made) :]
    times = {stage: seconds(results, stage, names) for stage, names in ids.items() if names}
    sizes = {
        stage: sum(size(results / FOLDERS[stage] / id) for id in names)
        for stage, names in ids.items()
        if names
    }
    lengths = measured_lengths(results, plan, ids["generate_responses"])
    sequences = pd.concat(
        pd.read_parquet(results / "decodes" / id / "sequences.parquet").assign(id=id)
        for id in ids["decode_live"]
    )
    tau = tau_by_kind(sequences[sequences["dtype"] == "float32"], plan)
    world = World(plan, lengths, tau | {"other": min(tau.values())}, {})
    shape = world.shape

    # What was done, from the tables.
    tokens = 0
    for id in ids["generate_responses"]:
        table = pd.read_parquet(results / "responses" / id / "responses.parquet")
        tokens += int(table["prompt_ids"].map(len).sum() + table["response_ids"].map(len).sum())
    calls = Counter()
    for dtype, rows in sequences.groupby("dtype"):
        calls[dtype] = int(rows["rounds"].sum())
    by_dtype = defaultdict(float)
    for id in ids["decode_live"]:
        dtype = "bfloat16" if "-bfloat16-" in id else "float32"
        by_dtype[dtype] += seconds(results, "decode_live", [id])[0]
    acceptance = pd.read_parquet(results / "scores" / ids["score_pool"][0] / "acceptance.parquet")
    replayed = 0.0
    for id in ids["replay_selectors"]:
        answers = pd.read_parquet(results / "replays" / id / "answers.parquet")
        replayed += float((answers["rounds"] * answers["seeds"]).sum())
        sized = results / "replays" / id / "pool_sizes.parquet"
        if sized.exists():
            replayed += float(pd.read_parquet(sized)["rounds"].sum()) * plan.study.replay.pool_sizes.seeds

    counted = defaultdict(list)
    for work in count_work(world):
        counted[work.stage].append(work)

    def total(stage: str, name: str) -> float:
        return sum(work.counts[name] for work in counted[stage])

    training: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for work in counted["train_drafter"]:
        training[work.detail][0] += work.counts["flops"]
    for id in ids["train_drafter"]:
        kind = id.split("-")[0]
        training[kind if kind in training else "block"][1] += times_of(results, "train_drafter", id)
    # Sets that a model rewords cost what writing costs.
    by_rule = [
        id
        for id in ids["prepare_set"]
        if getattr(plan.study.prompt_sets[id.rsplit("-", 1)[0]], "how", None) != "llm"
    ]
    score_flops = total("score_pool", "drafter_flops") + 2 * shape.multiplied * total(
        "score_pool", "target_tokens"
    )
    gate = read_json(results / "lossless" / ids["check_lossless"][0] / "lossless.json")
    light = {"figures": "draw_figure", "tables": "write_table"}
    once = {}
    for name in ("judge_claims", "copy_summary"):
        once[name] = once_of(results, name)
    for name in light.values():
        tables = [
            pd.read_csv(path, sep="\t") for path in sorted(results.glob(f"benchmarks/{name}-default-*.tsv"))
        ]
        once[name] = float(sum(table["s"].iloc[0] for table in tables) / len(tables))
    per_job = {stage: times[stage][0] / len(ids[stage]) for stage in ("fetch_target", "make_drafter")}
    return {
        "machine": machine,
        "source": f"bench/derive_unit_costs.py over the results of study `{plan.study.experiment}`",
        "target_weights": shape.parameters,
        "lengths": asdict(lengths),
        "tau": tau | {"other": min(tau.values())},
        "seconds": {
            **{f"{name}/job": value for name, value in (per_job | once).items()},
            "compute_stats/row": once_of(results, "compute_stats") / len(acceptance),
            "prepare_prompts/prompt": times["prepare_prompts"][0] / total("prepare_prompts", "prompts"),
            "prepare_set/prompt": sum(times_of(results, "prepare_set", id) for id in by_rule)
            / sum(work.counts["prompts"] for work in counted["prepare_set"] if work.detail == ""),
            "train_router/prompt": times["train_router"][0] / total("train_router", "prompts"),
            "check_lossless/call": times["check_lossless"][0] / total("check_lossless", "calls"),
            "decode_live/float32/call": by_dtype["float32"] / calls["float32"],
            "decode_live/bfloat16/call": by_dtype["bfloat16"] / calls["bfloat16"],
            "profile_decode/call": times["profile_decode"][0] / total("profile_decode", "calls"),
            "profile_costs/part": times["profile_costs"][0] / total("profile_costs", "parts"),
            "replay_selectors/round": times["replay_selectors"][0] / replayed,
        },
        "flops_per_second": {
            "generate_responses": 2 * shape.multiplied * tokens / times["generate_responses"][0],
            "score_pool": score_flops / times["score_pool"][0],
            **{f"train_drafter/{kind}": work / spent for kind, (work, spent) in sorted(training.items())},
        },
        "bytes": {
            "prepare_prompts/prompt": sizes["prepare_prompts"] / total("prepare_prompts", "prompts"),
            "score_pool/value": sizes["score_pool"]
            / (total("score_pool", "rows") + total("score_pool", "slots")),
            "decode_live/call": sizes["decode_live"] / sum(calls.values()),
            "replay_selectors/row": sizes["replay_selectors"] / total("replay_selectors", "rows"),
            "profile_decode/call": sizes["profile_decode"] / total("profile_decode", "calls"),
            "train_router/prompt": sizes["train_router"] / total("train_router", "prompts"),
            "profile_costs/job": sizes["profile_costs"] / len(ids["profile_costs"]),
            "check_lossless/job": sizes["check_lossless"],
            "study": size(results / "default"),
        },
        "dry_run": dry_run_line(),
        "study": {
            "seconds": {stage: round(value[0], 2) for stage, value in times.items()},
            "jobs": {stage: len(names) for stage, names in ids.items()},
            "memory": {stage: value[1] for stage, value in times.items()},
            "disk": sizes,
            "target_calls": dict(calls),
            "gate_tokens": gate["float32"]["tokens"],
            "acceptance_rows": len(acceptance),
            "sessions": len({session_of(prompt)[0] for prompt in sequences["prompt_id"]}),
            "plain_rounds": int(sequences.loc[sequences["selector"] == PLAIN, "rounds"].sum()),
        },
    }


def once_of(results: Path, name: str) -> float:
    """Seconds of a job that a study has once."""
    return float(pd.read_csv(results / "benchmarks" / f"{name}-default.tsv", sep="\t")["s"].iloc[0])


def dry_run(*overlays: Path) -> float:
    """Seconds of `snakemake -n` before anything was made, the fastest of a few."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "snakemake", "-n", "--snakefile", str(root / "Snakefile")]
    flags = ["--configfile", *map(str, overlays)] if overlays else []
    fastest = float("inf")
    for _ in range(DRY_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            subprocess.run([*command, "--directory", folder, *flags], check=True, capture_output=True)
            fastest = min(fastest, time.perf_counter() - begin)
    return fastest


def dry_run_line() -> dict[str, float]:
    """Seconds of a dry run as a line over jobs, through a small and a large study."""
    paper = Path(__file__).resolve().parents[1] / "config" / "paper"
    names = ("qwen3-8b.yaml", "scaling/seven-experts.yaml", "scaling/hundred-seeds.yaml")
    large = [paper / name for name in names]
    points = [(estimate_study(files).total.jobs, dry_run(*files)) for files in (large[:2], large)]
    (few, short), (many, long) = points
    per_job = (long - short) / (many - few)
    return {"job": per_job, "fixed": short - few * per_job}


def times_of(results: Path, stage: str, id: str) -> float:
    """Seconds of one job."""
    return seconds(results, stage, [id])[0]


def main() -> None:
    """Read the flags and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--machine", required=True, help="processor and cores that the study ran on")
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    write_json(flags.out, derive(flags.results, flags.machine))


if __name__ == "__main__":
    main()
