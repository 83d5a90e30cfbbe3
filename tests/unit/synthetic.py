"""Small synthetic tables with known acceptance rates, in the shapes that real stages write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scored import scored

from draftpool.artefacts import write_json, write_provenance, write_table
from draftpool.replay.run import replay_selectors

HASHES = {"initial_parameters": "0123456789abcdef", "data_order": "fedcba9876543210"}

DOMAINS = ["code", "maths", "sql", "summarisation", "rag", "qa"]
BASE = {"code": 0.34, "maths": 0.48, "sql": 0.42, "summarisation": 0.18, "rag": 0.2, "qa": 0.26}
SELECTORS = ["random", "ucb_bd", "ucb_be", "exp3", "normal_hedge", "best_fixed_query"]


def drafter(
    recipe: str, seed: int = 0, role: str = "generalist", home: str | None = None, **changes: object
) -> dict:
    """One entry of ``cfg["drafters"]``."""
    objective = {"kind": "dpace", "alpha": 0.5, "reduction": "anchor_mean"} | changes.pop("objective", {})
    shape = {"block_size": 4, "n_layers": 2, "steps": 40, "group": "", "clip": 10.0} | changes
    return {
        "name": f"{recipe}-s{seed}",
        "kind": "block",
        "recipe": recipe,
        "seed": seed,
        "role": role,
        "home": home,
        "objective": objective,
    } | shape


# Scored and replayed, but no domain of the study.
OUTSIDE = "abroad"


def study(
    domains: list[str] = DOMAINS, specialists: bool = True, sweeps: bool = False, n_resamples: int = 200
) -> dict:
    """A ``compute_stats`` configuration like that of the default (or, with sweeps, the objectives) study."""
    drafters = [drafter("generalist_dpace", seed) for seed in (0, 1)]
    drafters += [drafter("generalist_dflash", seed, objective={"kind": "dflash"}) for seed in (0, 1)]
    for entry in drafters[2:]:
        del entry["objective"]["alpha"]
    drafters += [drafter("generalist_long", steps=120)]
    if specialists:
        drafters += [drafter(f"specialist_{name}", role="specialist", home=name) for name in domains]
    if sweeps:
        drafters += _sweeps()
    pool = ["generalist_long-s0"] + [entry["name"] for entry in drafters if entry["role"] == "specialist"]
    return {
        "study": "synthetic",
        "domains": domains,
        "drafters": drafters,
        "pool": pool,
        "pools": [
            {"name": "main", "arms": pool, "generalist": "generalist_long-s0"},
            # A further one, where there are drafters enough.
            *(
                [{"name": "few", "arms": [*pool[:2], "plain"], "generalist": pool[0]}]
                if len(pool) > 2
                else []
            ),
        ],
        "stream_pools": {"mixed": "main"},
        "temperature": 0.0,
        "sampled": [],
        "costs_dtype": "float32",
        "generalist": "generalist_long-s0",
        "compare": [
            {"a": "generalist_dpace", "b": "generalist_dflash"},
            {"a": "generalist_long", "b": "generalist_dpace"},
        ],
        "bootstrap": {"n_resamples": n_resamples, "confidence": 0.95, "seed": 0},
    }


def _sweeps() -> list[dict]:
    kinds = ["uniform", "head_dependent", "dpace_cumulative", "dpace_continuation", "direct_surrogate"]
    made = [
        drafter(f"objective_{kind}", s, "sweep", objective={"kind": kind}, group="objective")
        for kind in kinds
        for s in range(3)
    ]
    for alpha in (0.0, 0.3, 0.7, 0.9):
        made.append(
            drafter(f"alpha_{int(alpha * 100):02d}", role="sweep", objective={"alpha": alpha}, group="alpha")
        )
    for kind in ("dpace", "dflash"):
        made += [
            drafter(
                f"block_{kind}_b{b}", role="sweep", objective={"kind": kind}, block_size=b, group="block_size"
            )
            for b in (8, 12, 16)
        ]
        made += [
            drafter(
                f"layers_{kind}_l{n}", role="sweep", objective={"kind": kind}, n_layers=n, group="n_layers"
            )
            for n in (1, 3)
        ]
        made += [
            drafter(
                f"reduction_{kind}_{r}",
                role="sweep",
                objective={"kind": kind, "reduction": r},
                group="reduction",
            )
            for r in ("weight_mean", "sequence_sum")
        ]
        made += [drafter(f"clip_{kind}", role="sweep", objective={"kind": kind}, clip=None, group="clip")]
    for entry in made:
        if entry["objective"]["kind"] == "dflash":
            del entry["objective"]["alpha"]
    return made


def rate(entry: dict, domain: str) -> float:
    """Per-slot acceptance rate of a drafter in a domain."""
    level = BASE.get(domain, 0.3)
    level += {"dpace": 0.03, "uniform": -0.05, "direct_surrogate": -0.02}.get(entry["objective"]["kind"], 0.0)
    level += 0.06 * (entry["steps"] > 100)
    if entry["objective"].get("alpha") == 0.0:
        level = 0.02
    if entry["role"] == "specialist":
        level += 0.22 if entry["home"] == domain else -0.12
    return float(np.clip(level, 0.02, 0.9))


def acceptance_table(
    cfg: dict, prompts: int = 8, length: int = 40, repeats: int = 1, seed: int = 0
) -> pd.DataFrame:
    """Acceptance table of Bernoulli drafters; answers have ``length`` tokens or a few less."""
    rng = np.random.default_rng(seed)
    frames = []
    for domain in cfg["domains"]:
        for p in range(prompts):
            ease = rng.normal(0, 0.06)
            for repeat in range(repeats):
                n = int(length - rng.integers(0, length // 4))
                for entry in cfg["drafters"]:
                    k = entry["block_size"] - 1
                    position = np.arange(n - 1)
                    left = n - 1 - position
                    gamma = np.clip(rate(entry, domain) + ease + rng.normal(0, 0.15, (n - 1, k)), 0.01, 0.99)
                    hits = rng.random((n - 1, k)) < gamma
                    match = np.cumprod(hits, axis=1).sum(axis=1)
                    accepted = np.minimum(match, left)
                    frames.append(
                        pd.DataFrame(
                            {
                                "prompt_id": f"{domain}-{p:03d}",
                                "domain": domain,
                                "repeat": repeat,
                                "drafter": entry["name"],
                                "position": position,
                                "left": left,
                                "k": k,
                                "accepted": accepted,
                                "committed": np.minimum(accepted + 1, left),
                                "censored": (match == k) | (match >= left),
                                "gamma": [list(row[:room]) for row, room in zip(gamma, left, strict=True)],
                                "reward_bd_full": np.nan,
                            }
                        )
                    )
    return scored(pd.concat(frames, ignore_index=True))


def decode(
    cfg: dict,
    acceptance: pd.DataFrame,
    stream: str = "mixed",
    dtype: str = "float32",
    seeds: tuple[int, ...] = (0, 1),
    seed: int = 0,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Step and sequence tables of fixed drafters, plain decoding and selectors, replayed from the table."""
    rng = np.random.default_rng(seed)
    columns = ["k", "accepted", "committed"]
    grouped = acceptance.sort_values("position").groupby(["prompt_id", "repeat", "drafter"])
    cells = {key: group[columns].to_numpy() for key, group in grouped}
    answers = (
        acceptance.groupby(["prompt_id", "repeat"])
        .agg(domain=("domain", "first"), n=("position", "max"))
        .reset_index()
    )
    order = {name: i for i, name in enumerate(rng.permutation(answers["prompt_id"].unique()))}
    fixed = [f"fixed:{entry['name']}" for entry in cfg["drafters"] if entry["role"] != "sweep"]
    steps, sequences = [], []
    for answer in answers.itertuples():
        index, n = order[answer.prompt_id], int(answer.n) + 2
        rounds = {arm: _walk(cells[answer.prompt_id, answer.repeat, arm]) for arm in cfg["pool"]}
        best = min(rounds, key=rounds.get)
        plain_wall = 0.022 * (n - 1) * (1 + 0.03 * rng.random())
        for selector in [*fixed, "plain", *SELECTORS]:
            for selector_seed in seeds if selector in SELECTORS else (0,):
                head = {
                    "run_id": f"{stream}-{dtype}",
                    "stream": stream,
                    "selector": selector,
                    "selector_seed": selector_seed,
                    "repeat": answer.repeat,
                    "prompt_id": answer.prompt_id,
                    "domain": answer.domain,
                    "prompt_index": index,
                    "dtype": dtype,
                }
                own = _decode_one(cells, cfg["pool"], answer, selector, best, n, rng)
                steps += [{**head, **row} for row in own]
                wall = sum(sum(row[key] for key in row if key.startswith("t_")) for row in own)
                sequences.append(
                    {
                        **head,
                        "sha256": "0" * 64,
                        "n_tokens": n,
                        "rounds": len(own),
                        "wall_time": wall,
                        "t_prefill": 0.05,
                        "plain_wall_time": plain_wall,
                        "plain_n_tokens": n,
                        "plain_sha256": "0" * 64,
                        "matches_plain": True,
                        "first_mismatch": -1,
                        "top2_margin": np.nan,
                    }
                )
    return pd.DataFrame(steps), pd.DataFrame(sequences)


def _walk(cell: np.ndarray) -> int:
    position, rounds = 0, 0
    while position < len(cell):
        position += int(cell[position, 2])
        rounds += 1
    return rounds


def _decode_one(
    cells: dict, pool: list[str], answer: object, selector: str, best: str, n: int, rng: np.random.Generator
) -> list[dict]:
    rows, position = [], 0
    skill = {
        "random": 0.0,
        "exp3": 0.1,
        "ucb_be": 0.45,
        "ucb_bd": 0.6,
        "normal_hedge": 0.7,
        "best_fixed_query": 1.0,
    }
    while position < n - 1:
        if selector.startswith("fixed:"):
            arm = selector.removeprefix("fixed:")
        elif selector == "plain":
            arm = "plain"
        else:
            arm = best if rng.random() < skill[selector] else str(rng.choice(pool))
        drafted, accepted, committed = 0, 0, 1
        if arm != "plain":
            drafted, accepted, committed = map(int, cells[answer.prompt_id, answer.repeat, arm][position])
        rows.append(
            {
                "round": len(rows),
                "arm": arm,
                "position": position,
                "n_drafted": drafted,
                "n_accepted": accepted,
                "n_committed": committed,
                "hit_eos": False,
                "hit_limit": position + committed == n - 1,
                "reward_be": accepted / max(drafted, 1),
                "reward_bd": np.nan,
                "propensity": 1.0,
                "losses": None,
                "t_select": 1e-5,
                "t_draft": 0.003 * (drafted > 0),
                "t_verify": 0.022 + 0.0004 * drafted + 0.001 * rng.random(),
                "t_evaluate": 0.002 * (selector == "normal_hedge"),
                "t_switch": 0.0005,
                "t_commit": 0.0004,
            }
        )
        position += committed
    return rows


def training_log(entry: dict, seed: int = 0) -> pd.DataFrame:
    """A training log with plausible curves."""
    rng, steps, slots = np.random.default_rng(seed), entry["steps"], entry["block_size"] - 1
    progress = 1 - np.exp(-3 * np.arange(steps) / steps)
    confidence = np.array([0.55 * 0.75**j for j in range(slots)])[:, None] * progress + 0.02 * rng.random(
        (slots, steps)
    )
    smooth = (
        0.5 * confidence + 0.5
        if entry["objective"]["kind"].startswith("dpace")
        else np.full_like(confidence, 0.7)
    )
    prefix = np.cumprod(smooth, axis=0)
    weight = np.cumsum(prefix[::-1], axis=0)[::-1]
    share = weight / weight.sum(axis=0)
    return pd.DataFrame(
        {
            "step": np.arange(1, steps + 1),
            "loss": 8 - 5 * progress + 0.1 * rng.random(steps),
            "grad_norm": 1 + rng.random(steps),
            "clipped": (rng.random(steps) < 0.3).astype(int),
            "lr": 1e-3,
            "tokens_per_s": 2000 + 100 * rng.random(steps),
            "step_time": 0.2 + 0.004 * (entry["objective"]["kind"] == "dpace") + 0.002 * rng.random(steps),
            **{f"confidence_{j + 1}": confidence[j] for j in range(slots)},
            **{f"weight_share_{j + 1}": share[j] for j in range(slots)},
        }
    )


def profiled() -> pd.DataFrame:
    """Parts of a round of two methods."""
    rows = [
        {"method": method, "part": part, "seconds": seconds, "operator_seconds": 0.8 * seconds, "rounds": 10}
        for method in ("plain", "fixed:generalist-s0")
        for part, seconds in (("select", 0.001), ("verify", 0.3), ("draft", 0.05 * (method != "plain")))
    ]
    made = pd.DataFrame(rows).assign(dtype="float32")
    return made.assign(python_seconds=made["seconds"] - made["operator_seconds"])


def replayed(folder: Path, cfg: dict, pool: dict) -> Path:
    """Replay two learners of a pool on a written study."""
    name, pool = pool["name"], pool["arms"]
    line, costs_of = {"fixed": 0.0002, "per_token": 0.00001}, folder / f"costs-{name}"
    costs_of.mkdir()
    costs = {
        "verify": {"1": 0.0225, "4": 0.0245},
        "draft": dict.fromkeys(pool, 0.003),
        "catch_up": dict.fromkeys(pool, line),
        "evaluate": 0.006,
        "evaluate_catch_up": line,
        "alone": [],
        "ahead": [],
        "positions": dict.fromkeys(pool),
        "drafted": dict.fromkeys(pool, 3.0),
        "select": {"bandit": 0.0001, "full": 0.0002},
        "memory": dict.fromkeys(pool, {"weights": 1000, "state": 16.0}),
    }
    write_json(costs_of / "costs.json", costs)
    stream = {
        "domains": cfg["domains"],
        "prompts_per_domain": None,
        "order": "shuffled",
        "seed": 0,
        "limit": None,
        "seeds": 3,
    }
    options = {
        "pool": pool,
        "homes": {},
        "pool_sizes": {
            "drafters": pool,
            "sizes": [2, len(pool)],
            "pools": 2,
            "seeds": 2,
            "selectors": ["ucb_bd", "normal_hedge"],
        }
        if name == "main"
        else None,
        "generalist": pool[0],
        "selectors": {"ucb_bd": {"kind": "metasd_ucb"}, "normal_hedge": {"kind": "hedgespec"}}
        | {"ucb_full": {"kind": "metasd_ucb", "reward": "bd_full"}},
        "few": [],
        "few_seeds": 1,
        "streams": {"heldout": stream | {"order": "blocks"}},
    }
    if name == "main":
        options["streams"] |= {"mixed": stream, OUTSIDE: stream | {"domains": [OUTSIDE]}}
    acceptance, out = folder / "acceptance.parquet", folder / f"replay-{name}"
    replay_selectors(options, acceptance, costs_of, [folder / "responses"], None, out)
    return out


def write_study(folder: Path, cfg: dict, prompts: int = 8, length: int = 40, live: bool = True) -> dict:
    """Write all inputs of ``compute_stats`` and return its keyword arguments (but for ``out``)."""
    acceptance = acceptance_table(cfg, prompts, length)
    # What no drafter was trained on is scored with the pool alone.
    abroad = acceptance_table(cfg | {"domains": [OUTSIDE]}, 3, length)
    # There the target read all drafts, so that one selector more can be replayed.
    abroad = abroad[abroad["drafter"].isin(cfg["pool"])].assign(reward_bd_full=0.5)
    everything = pd.concat([acceptance, abroad], ignore_index=True)
    write_table(folder / "acceptance.parquet", everything)
    decodes = []
    for dtype in ("float32", "bfloat16") if live else ():
        steps, sequences = decode(cfg, acceptance, dtype=dtype)
        write_table(folder / dtype / "steps.parquet", steps)
        write_table(folder / dtype / "sequences.parquet", sequences)
        decodes.append(folder / dtype)
    training = {}
    for number, entry in enumerate(cfg["drafters"]):
        training[entry["name"]] = folder / entry["name"]
        training[entry["name"]].mkdir()
        training_log(entry, number).to_csv(training[entry["name"]] / "training.csv", index=False)
        write_provenance(
            training[entry["name"]], {"objective": entry["objective"], "seed": entry["seed"]}, HASHES
        )
    profiles = [folder / "profile"] if live else []
    for profile in profiles:
        profile.mkdir()
        profiled().to_csv(profile / "parts.csv", index=False)
    write_json(folder / "lossless.json", LOSSLESS)
    answers = everything.groupby(["prompt_id", "domain"]).agg(n=("position", "max")).reset_index()
    rng = np.random.default_rng(1)
    responses = pd.DataFrame(
        {
            "prompt_id": answers["prompt_id"],
            "domain": answers["domain"],
            "prompt_ids": [[7] * 12 for _ in answers["n"]],
            "response_ids": [list(range(n + 2)) for n in answers["n"]],
            "finish": np.where(rng.random(len(answers)) < 0.5, "eos", "limit"),
            "repetition": rng.random(len(answers)) * 0.2,
        }
    )
    write_table(folder / "responses" / "responses.parquet", responses)
    benchmarks = []
    for name in ("train_drafter-dpace-mixed-s0-0123456789ab", "train_drafter-x", "score_pool-y"):
        benchmarks.append(folder / f"{name}.tsv")
        benchmarks[-1].write_text("s\th:m:s\tmax_rss\n12.5\t0:00:12\t100\n")
    return {
        "cfg": cfg,
        "acceptance": [folder / "acceptance.parquet"],
        "decodes": decodes,
        "profiles": profiles,
        "replays": [replayed(folder, cfg, pool) for pool in cfg["pools"]] if live else [],
        "training": training,
        "lossless": folder / "lossless.json",
        "responses": [folder / "responses"],
        "benchmarks": benchmarks,
    }


LOSSLESS = {
    "float32": {
        "prompts": 24,
        "tokens": 1536,
        "drafted": 3000,
        "accepted": 500,
        "rejected": 2500,
        "mismatches": 0,
    },
    "bfloat16": {
        "positions": 400,
        "flips": 6,
        "rate": 0.015,
        "logit_diff_p99": 0.1,
        "margin_bound": 0.4,
        "max_flip_margin": 0.1,
        "flip_margins": [0.1],
        "median_top2_margin": 2.0,
    },
}
