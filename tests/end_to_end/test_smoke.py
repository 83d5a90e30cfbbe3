"""The smoke study on the real model, from downloads to figures, and a training job that is killed midway."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import yaml
from smoke_study import DEFAULT, SMOKE, command, run

from draftpool.artefacts import read_json, read_table
from draftpool.cli import STAGES
from draftpool.config.load import load
from draftpool.config.plan import Plan
from draftpool.decoding.engine import decode
from draftpool.decoding.sequence import Sampling, prefill
from draftpool.drafters.load import load_drafter
from draftpool.figures import FIGURES
from draftpool.provenance.chain import Chain
from draftpool.replay.answers import lay_out
from draftpool.replay.engine import EpisodeDraws, replay
from draftpool.selectors.base import make_selector
from draftpool.tables import TABLES
from draftpool.targets.load import end_ids, load_target, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.network]


def test_headline_numbers_stand_under_their_fixed_names(study):
    summary = read_json(study / "results/smoke/summary.json")
    names = [
        "tau/generalist_dpace/mean",
        "tau/generalist_dflash/mean",
        "tau/generalist-s0/maths",
        "headroom/mixed",
        "speedup/best_fixed/mixed",
        "speedup/ucb_bd/mixed",
        "mat/hedgespec/mixed",
        "regret/exp3/mixed",
        "lossless/float32/mismatches",
        "overhead/dpace_step",
        "time/train_drafter",
    ]
    assert not set(names) - set(summary)
    for name, entry in summary.items():
        assert set(entry) == {"value", "low", "high", "n", "unit"}, name
    assert summary["tau/generalist-s0/mean"]["value"] >= 1.0
    # Three block generalists, two block specialists, an EAGLE head and a small model.
    assert summary["time/train_drafter"]["n"] == 7


def test_decoding_was_lossless_and_speculative(study):
    (report,) = study.glob("results/lossless/*/lossless.json")
    exact = read_json(report)["float32"]
    assert exact["mismatches"] == 0
    assert min(exact[key] for key in ("prompts", "tokens", "drafted", "accepted", "rejected")) > 0
    live = pd.concat(read_table(path) for path in study.glob("results/decodes/*/sequences.parquet"))
    exact = live[live["dtype"] == "float32"]
    assert len(exact) and exact["matches_plain"].all()
    assert set(exact["selector"]) > {
        "plain",
        "fixed:generalist-s0",
        "random",
        "ucb_bd",
        "ucb_be",
        "exp3",
        "hedgespec",
    }


def test_every_figure_and_table_has_content(study):
    folder = study / "results/smoke"
    figures = [name for name, part in FIGURES.items() if part != "sweeps"]
    assert {path.name for path in (folder / "figures").iterdir()} == {
        *(f"{name}.{end}" for name in figures for end in ("png", "pdf")),
        "provenance",
    }
    assert {path.name for path in (folder / "tables").iterdir()} == {
        *(f"{name}.{end}" for name in TABLES for end in ("csv", "md", "tex", "html")),
        "provenance",
    }
    for path in (folder / "figures").glob("*.p*"):
        assert path.read_bytes().startswith({".png": b"\x89PNG", ".pdf": b"%PDF"}[path.suffix])
        assert path.stat().st_size > 5_000
    for path in (folder / "tables").glob("*.csv"):
        assert len(pd.read_csv(path)) > 0, path


def test_d44_every_artefact_says_how_it_was_made(study):
    folders = [
        path
        for kind in ("targets", "prompts", "responses", "drafters", "decodes")
        for path in (study / "results" / kind).iterdir()
    ]
    # Trained drafters and those made of a few options, two live streams.
    assert len(folders) >= 1 + 6 + 12 + 7 + 4 + 2
    for folder in folders:
        assert yaml.safe_load((folder / "resolved.yaml").read_text()), folder
        assert read_json(folder / "provenance.json")["command"], folder


def test_the_chain_of_every_figure_and_table_ends_at_prompts_and_target(study, monkeypatch):
    monkeypatch.chdir(study)
    made = Path("results/smoke")
    shown = [path for kind in ("figures/*.png", "tables/*.csv") for path in sorted(made.glob(kind))]
    ends = {str(path) for kind in ("prompts", "targets") for path in Path("results", kind).iterdir()}
    chain = Chain(*shown, made / "claims")
    told = {node.shown: node for node in chain.nodes}
    assert set(map(str, shown)) <= set(told) and ends <= set(told)
    # Every stage is met: nothing but plain files lies outside the chain.
    stages = {node.record["stage"] for node in chain.nodes}
    assert stages >= {*STAGES, "draw_figure", "write_table"} - {"fetch_drafter"}
    for node in chain.nodes:
        record = node.record
        assert node.state == "" and "git_commit" in record and record["versions"]["torch"], node.shown
        assert record["inputs"] or node.shown in ends or record["stage"] == "make_drafter", node.shown
        for link in node.links:
            assert link.state == "" and (link.node is not None or link.flag == "benchmarks"), link
    trained = next(node for node in chain.nodes if node.record["stage"] == "train_drafter")
    assert trained.record["device"] == "cpu" and "seed" in trained.record["seeds"]


@pytest.mark.parametrize("name", ["main", "mixed"])
def test_d28_replay_equals_live_decoding_on_the_real_target(study, name):
    """Arm, accepted and committed tokens of every round, on eight prompts under three learners.

    Of the mixed pool all kinds but the one that remembers its stream, which is not decoded in order here.
    """
    plan, limit, n_prompts = Plan(load(DEFAULT, SMOKE)), 16, 8
    pool = [arm for arm in plan.pools[name].arms if arm != "suffix"]
    folder = study / f"results/targets/{plan.target.id}"
    target = load_target(folder, plan.study.target.taps, torch.device("cpu"), torch.float32)
    ends = end_ids(load_tokenizer(folder), target.hf_config)
    arms = {
        arm: None
        if arm == "plain"
        else load_drafter(arm, study / f"results/drafters/{plan.drafter(arm).id}", target)
        for arm in pool
    }
    table = read_table(study / f"results/scores/{plan.score.id}/acceptance.parquet")
    # Other kinds are scored on the domains that are trained on.
    table = table[table["domain"].isin(plan.trained_domains) & (table["stream"] == "")]
    answers = lay_out(table, pool, limit)
    tables = [
        read_table(study / f"results/responses/{plan.responses[domain, 'eval'].id}/responses.parquet")
        for domain in plan.study.domains
    ]
    written = pd.concat(tables).set_index("prompt_id").prompt_ids
    rounds = accepted = 0
    for cfg in ({"kind": "metasd_ucb"}, {"kind": "exp3"}, {"kind": "hedgespec"}):
        for row in range(n_prompts):
            prompt_id = answers.frame.prompt_id[row]
            draws = EpisodeDraws([(0, 0, prompt_id)], len(pool) + 1)
            made = replay(make_selector(cfg, pool), answers, np.array([row]), draws)
            start = prefill(target, [int(token) for token in written[prompt_id]], limit, answers.k_pool)
            live = decode(
                target,
                start,
                arms,
                make_selector(cfg, pool),
                Sampling(limit, ends),
                answers.k_pool,
                prompt_id,
                hard=name == "mixed",
            ).rounds
            assert [pool.index(step["arm"]) for step in live] == made.arms[:, 0].tolist()
            assert [step["n_accepted"] for step in live] == made.accepted[:, 0].tolist()
            assert [step["n_committed"] for step in live] == made.committed[:, 0].tolist()
            rounds, accepted = rounds + len(live), accepted + int(made.accepted.sum())
    assert rounds > 3 * n_prompts and accepted > 0


def test_further_pools_are_compared_with_their_own_generalists(study):
    stats = study / "results/smoke/stats"
    board, gap = pd.read_csv(stats / "leaderboard.csv"), pd.read_csv(stats / "gap.csv")
    assert {"heldout", "heldout@banditspec", "heldout@mixed"} <= set(board["stream"])
    mixed = board[board["stream"] == "heldout@mixed"]
    arms = {
        f"fixed:{name}" for name in ("generalist-s0", "eagle-s0", "small-s0", "early_exit", "ngram", "suffix")
    }
    assert arms <= set(mixed["selector"])
    assert (gap[gap["selector"] == "best_fixed_query"]["value"] >= 0).all()
    # A live stream that a further pool decodes agrees with its replay, drafter by drafter.
    agreement = pd.read_csv(stats / "agreement.csv")
    own = agreement[(agreement["stream"] == "mixed_pool") & (agreement["dtype"] == "float32")]
    assert set(own["drafter"]) == {arm.removeprefix("fixed:") for arm in arms}
    assert (own["agreeing"] == own["n"]).all() and (own["n"] > 0).all()


def test_claims_get_verdicts(study):
    verdicts = {row["id"]: row for row in read_json(study / "results/smoke/claims/claims.json")}
    assert verdicts["metasd_bd_regret"]["verdict"] != "not judged here"
    assert verdicts["dpace_alpha_zero"]["verdict"] == "not judged here"
    assert all(row["n"] > 0 for row in verdicts.values() if row["verdict"] != "not judged here")


def test_a_finished_study_has_nothing_to_do(study):
    assert "Nothing to be done" in run(study, "-n")


def test_d41_a_killed_training_job_goes_on_from_its_checkpoint(study):
    longer = study / "longer.yaml"
    training = {"steps": 60, "checkpoint_every": 5}
    longer.write_text(yaml.safe_dump({"drafters": {"generalist_dflash": {"training": training}}}))
    drafter = Plan(load(DEFAULT, SMOKE, longer)).drafter("generalist_dflash-s0").id
    wanted = f"results/drafters/{drafter}"
    checkpoint = study / f"results/state/{drafter}/checkpoint.safetensors"
    arguments = ("--cores", "2", wanted)
    with subprocess.Popen(
        command(study, *arguments, overlays=(longer,)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as snakemake:
        deadline = time.monotonic() + 300
        while not checkpoint.exists():
            assert snakemake.poll() is None and time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.05)
        jobs = psutil.Process(snakemake.pid).children(recursive=True)
        (job,) = [process for process in jobs if "train_drafter" in process.cmdline()]
        os.kill(job.pid, signal.SIGKILL)
        assert snakemake.wait(timeout=60) != 0
    assert checkpoint.exists() and not (study / wanted).exists()
    run(study, *arguments, overlays=(longer,))
    log = (study / f"results/logs/train_drafter/{drafter}.log").read_text()
    assert "resumed from the checkpoint at step" in log
    assert pd.read_csv(study / wanted / "training.csv")["step"].tolist() == list(range(60))
