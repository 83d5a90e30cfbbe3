"""The jobs of whole studies, and what a run leaves besides its artefacts."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from draftpool.estimate.command import estimate_study

REPOSITORY = Path(__file__).resolve().parents[2]

DOMAINS = ["code", "maths", "qa", "rag", "sql", "summarisation"]
# `smoke` has a test of its own, and `claims` is no study.
STUDIES = sorted(
    str(path.relative_to(REPOSITORY / "config"))
    for path in (REPOSITORY / "config").rglob("*.yaml")
    if path.stem not in ("smoke", "claims") and path.parent.name != "scaling"
)
PAPER = REPOSITORY / "config" / "paper"
SCORED = {"heatmap_tau", "objectives", "surrogate", "training_dynamics"}
LIVE = {"arm_choice", "regret_curves", "selectors", "time_split"}
PROFILED = {"round_profile"}
REPLAYED = {"leaderboard", "prediction", "streams"}
# Prompt sets of the tiny study.
SETS = ("drawn", "slips", "talks")
SCORED_TABLES = {"dpace_table", "drafters_table", "objectives_table"}


def dry_run(tmp_path: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "snakemake", "-n", "--snakefile", str(REPOSITORY / "Snakefile")]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def job_stats(output: str) -> dict[str, int]:
    table = output.split("Job stats:")[1].split("\n\n")[0]
    rows = [line.split() for line in table.splitlines() if line and not line.startswith(("job", "-"))]
    return {name: int(count) for name, count in rows}


def test_smoke_study_is_the_whole_workflow_with_golden_job_counts(tmp_path):
    overlay = yaml.safe_load((REPOSITORY / "config/smoke.yaml").read_text())
    assert overlay["experiment"] == "smoke"
    smoke = ("--configfile", str(REPOSITORY / "config/smoke.yaml"))
    stats = job_stats(dry_run(tmp_path, *smoke))
    decodes = stats.pop("decode_live")
    assert decodes in (2, 4)  # two streams in float32, and in bfloat16 where the processor has it
    assert stats.pop("total") == sum(stats.values()) + decodes
    assert stats == {
        "all": 1,
        "fetch_target": 1,
        "prepare_prompts": len(DOMAINS),
        "prepare_set": 3,
        "generate_responses": 2 * len(DOMAINS) + 3,
        # Three block generalists, an EAGLE head, a small model, and specialists.
        "train_drafter": 5 + len(overlay["drafters"]["specialist"]["domains"]),
        "make_drafter": 4,
        "check_lossless": 1,
        "score_pool": 1,
        "profile_decode": 1,
        # The main pool and two further ones.
        "profile_costs": 3,
        "train_router": 1,
        "replay_selectors": 3,
        "compute_stats": 1,
        "copy_summary": 1,
        "judge_claims": 1,
        "trace_provenance": 1,
        **{f"draw_{name}": 1 for name in SCORED | LIVE | PROFILED | REPLAYED | {"pool_sizes", "pools"}},
        **{
            f"write_{name}": 1
            for name in SCORED_TABLES
            | {"headroom_table", "metasd_table", "leaderboard_table", "streams_table", "pools_table"}
        },
    }
    assert not any(tmp_path.glob("results/*")), "a dry run wrote into results/"


@pytest.mark.parametrize("overlay", STUDIES)
def test_every_study_of_the_repository_can_be_planned(tmp_path, overlay):
    stats = job_stats(dry_run(tmp_path, "--configfile", str(REPOSITORY / "config" / overlay)))
    assert stats["train_drafter"] >= 2 and stats["compute_stats"] == 1
    # `draftpool plan` knows every job.
    assert estimate_study([REPOSITORY / "config" / overlay]).total.jobs == stats["total"]


@pytest.mark.parametrize(
    "overlays",
    [
        ("qwen3-8b.yaml", "scaling/seven-experts.yaml"),
        ("llama31-8b.yaml", "scaling/seven-experts.yaml"),
        ("qwen3-8b.yaml", "scaling/seven-experts.yaml", "scaling/qwen3-32b.yaml"),
        ("qwen3-8b.yaml", "scaling/seven-experts.yaml", "scaling/hundred-seeds.yaml"),
    ],
)
def test_overlays_over_the_papers_studies_can_be_planned(tmp_path, overlays):
    files = [PAPER / name for name in overlays]
    stats = job_stats(dry_run(tmp_path, "--configfile", *map(str, files)))
    assert stats["train_drafter"] == (701 if "hundred" in overlays[-1] else 8)
    assert stats["decode_live"] == 2 * 8
    assert estimate_study(files).total.jobs == stats["total"]


def test_targets_ask_for_their_part_only(new_checkout):
    drafters = new_checkout.jobs("drafters")
    assert drafters == Counter(
        {
            "Fetching the target model: tinyllama": 1,
            "Preparing prompts: maths": 1,
            "Generating the target's answers: maths-train": 1,
            "Training drafter dpace-mixed-s0": 2,  # general-s0 and the sweep's depth_l2-s0
            "Training drafter dpace-mixed-s1": 1,
            "Training drafter dflash-mixed-s0": 1,
            "Training drafter dpace-maths-s0": 1,
        }
    )
    figures = new_checkout.jobs("figures")
    drawn = [f"Drawing figure {name}" for name in SCORED | LIVE | REPLAYED | {"ablations"}]
    below = [
        *(f"Generating the target's answers: {name}-eval" for name in ("maths", "stories", *SETS)),
        "Preparing prompts: stories",
        *(f"Preparing a prompt set: {name}" for name in SETS),
        "Checking losslessness: lossless",
        "Scoring all drafters: acceptance",
        "Decoding live: mixed-float32",
        "Measuring the costs of a round",
        "Replaying selectors",
        "Computing statistics",
    ]
    assert figures == drafters + Counter(below + drawn)


def test_a_further_pool_of_other_kinds_adds_its_own_jobs(new_checkout):
    before = new_checkout.jobs()
    overlay = {
        "drafters": {
            "head": {"kind": "eagle", "objective": {"kind": "tvd"}, "training": {"steps": 2}},
            "lookup": {"kind": "ngram"},
            "store": {"kind": "suffix"},
            "theirs": {"kind": "checkpoint", "layout": "causal_lm", "path": "models/other"},
        },
        "pools": {
            "kinds": {
                "drafters": ["general-s0", "head-s0", "lookup", "store", "theirs", "plain"],
                "generalist": "general-s0",
                "streams": ["heldout", "kinds"],
                "selectors": ["ucb"],
            }
        },
        "decode": {"streams": {"kinds": {"prompts_per_domain": 1, "pool": "kinds"}}},
    }
    after = new_checkout.jobs(*new_checkout.overlay(overlay))
    assert after - before == Counter(
        {
            "Training drafter eagle-tvd-mixed-s0": 1,
            "Making drafter lookup": 1,
            "Making drafter store": 1,
            "Fetching drafter theirs": 1,
            "Measuring the costs of a round": 1,
            "Decoding live: kinds-float32": 1,
            "Replaying selectors": 1,
            "Drawing figure pools": 1,
            "Writing table pools_table": 1,
        }
    )
    assert not before - after


def test_a_study_without_live_decoding_or_sweeps_has_fewer_figures(new_checkout, tmp_path):
    config = new_checkout.read_config()
    del config["decode"], config["sweeps"], config["selectors"], config["pool"], config["replay"]
    checkout = new_checkout.copy(tmp_path / "checkout")
    checkout.write_config(config)
    made = checkout.jobs()
    assert not any(name.startswith(("Decoding", "Checking")) for name in made)
    drawn = {f"Drawing figure {name}" for name in SCORED} | {
        f"Writing table {name}" for name in SCORED_TABLES
    }
    assert {name for name in made if "figure" in name or "table" in name} == drawn


def test_d44_a_run_leaves_an_index_and_a_resolved_configuration_that_reruns_nothing(finished):
    results = finished.root / "results"
    with (results / "index.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    stages = Counter(row["stage"] for row in rows)
    assert stages["train_drafter"] == 5 and stages["decode_live"] == 1
    trained = {row["id"] for row in rows if row["stage"] == "train_drafter"}
    assert trained == {path.name for path in (results / "drafters").iterdir() if path.is_dir()}
    for stage, count in stages.items():
        assert len(list((results / "logs" / stage).glob("*.log"))) == count, stage
        assert len(list((results / "benchmarks").glob(f"{stage}-*.tsv"))) == count, stage
    resolved = yaml.safe_load((results / "tiny/resolved.yaml").read_text())
    assert resolved["drafters"]["general"]["training"]["weight_decay"] == 0.01  # a default, filled in
    finished.write_config(resolved)
    assert finished.jobs() == Counter()


def test_a_run_begins_with_a_banner_and_ends_with_a_list_of_figures(finished_checkout):
    shown = (finished_checkout.root / "printed.txt").read_text()
    banner = shown.split("draftpool\n")[1]
    assert "study:           tiny" in banner
    assert "device:          cpu (CPU)" in banner
    assert "live streams:    mixed in float32" in banner
    assert "drafters:        5, 2 of them in the pool" in banner
    finished = shown.split("Figures and tables:\n")[1]
    assert "  results/tiny/figures/heatmap_tau.png" in finished and "results/tiny/tables/" in finished


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"drafterz": {}}, "config key `drafterz`: unknown key -> did you mean `drafters`?"),
        (
            {"selectors": {"random": {"kind": "randon"}}},
            "config key `selectors.random`: draftpool.selectors: unknown",
        ),
    ],
)
def test_bad_configuration_is_one_line(new_checkout, overlay, message):
    done = new_checkout.snakemake("-n", *new_checkout.overlay(overlay))
    assert done.returncode == 1
    shown = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if not line.startswith(("Config file", "Using"))
    ]
    assert len(shown) == 1 and message in shown[0]


def test_a_training_in_several_processes_is_told_so_and_gets_cores(new_checkout, tmp_path):
    """By a variable, since another split must not change the command; other trainings as before."""
    checkout = new_checkout.copy(tmp_path / "checkout")
    pretend = checkout.root / "pretend/draftpool"
    dump = "import os\nif out.is_dir():\n    told = [flags.threads, os.environ['DRAFTPOOL_SPLITS']]\n"
    dump += "    (out / 'told.json').write_text(__import__('json').dumps(told))\n"
    pretend.write_text(pretend.read_text() + dump)
    training = {"processes": 3, "accumulate": 2, "batch_sequences": 6}
    overlay = checkout.overlay({"drafters": {"baseline": {"training": training}}})
    printed = checkout.snakemake("--cores", "4", "drafters", *overlay)
    assert printed.returncode == 0, printed.stdout + printed.stderr
    told = {
        folder.name.rsplit("-", 1)[0]: json.loads((folder / "told.json").read_text())
        for folder in (checkout.root / "results/drafters").iterdir()
    }
    assert len(told) > 2 and {name for name, (threads, _) in told.items() if threads == 3} == {
        "dflash-mixed-s0"
    }
    assert {threads for threads, _ in told.values()} == {1, 3}
    for _, splits in told.values():
        ((name, split),) = json.loads(splits).items()
        assert name.startswith("dflash-mixed-s0-") and split == [3, 2]
