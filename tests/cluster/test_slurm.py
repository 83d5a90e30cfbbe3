"""The whole workflow on a real Slurm: which rules run as jobs, what they ask for, how lost jobs go on."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml

from draftpool.artefacts import read_json
from draftpool.config.load import load
from draftpool.config.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.network]

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = [REPOSITORY / name for name in ("config/default.yaml", "config/smoke.yaml", "tests/small.yaml")]
LIGHT = {"fetch_target", "prepare_prompts", "make_drafter", "fetch_drafter", "compute_stats", "judge_claims"}
# What the profile's lines must become: MB, minutes, GPUs.
ASKED = {
    "prepare_set": (4000, 60, 1),
    "generate_responses": (4000, 240, 1),
    "train_drafter": (6000, 480, 1),
    "check_lossless": (8000, 60, 1),
    "score_pool": (8000, 120, 1),
    "decode_live": (6000, 480, 1),
    "profile_decode": (6000, 60, 1),
    "profile_costs": (4000, 60, 1),
    "train_router": (2000, 30, 0),
    "replay_selectors": (2000, 60, 0),
}


def minutes(limit: str) -> int:
    """Minutes of Slurm's `[days-]hours:minutes:seconds`."""
    days, _, clock = limit.rpartition("-")
    hours, minute, _ = map(int, clock.split(":"))
    return (int(days or 0) * 24 + hours) * 60 + minute


def test_every_heavy_rule_is_a_slurm_job(slurm_study):
    folder, jobs = slurm_study
    plan = Plan(load(*CONFIGS))
    wanted = {stage: len(made) for stage, made in plan.by_stage().items() if made and stage not in LIGHT}
    assert set(wanted) == set(ASKED)
    done = [job for job in jobs if job["JobState"] == "COMPLETED"]
    assert Counter(job["rule"] for job in done) == wanted
    assert read_json(folder / "results/smoke/summary.json")["lossless/float32/mismatches"]["value"] == 0


def test_jobs_ask_for_what_the_profile_says(slurm_study):
    _, jobs = slurm_study
    for job in jobs:
        megabytes, time_limit, gpus = ASKED[job["rule"]]
        assert job["MinMemoryNode"] in (f"{megabytes}M", f"{megabytes / 1000:g}G"), job
        assert minutes(job["TimeLimit"]) == time_limit, job
        assert job.get("TresPerJob", "") == ("gres:gpu:1" if gpus else ""), job
        assert job["Partition"] == "main" and job["NumCPUs"] == "1", job
        assert job["Requeue"] == "1", job


def test_a_finished_study_has_nothing_to_do(slurm, slurm_study):
    folder, _ = slurm_study
    before = len(slurm.jobs())
    assert "Nothing to be done" in slurm.run(folder)
    assert len(slurm.jobs()) == before


def cancel(slurm, job: dict[str, str]) -> None:
    slurm.call("scancel", job["JobId"])


def kill_processes(slurm, job: dict[str, str]) -> None:
    for process in psutil.process_iter(["cmdline"]):
        if "train_drafter" in (process.info["cmdline"] or []):
            process.kill()


def take_node_away(slurm, job: dict[str, str]) -> None:
    slurm.node("down")
    time.sleep(2)
    slurm.node("up")


def requeue(slurm, job: dict[str, str]) -> None:
    """What preemption does."""
    slurm.call("scontrol", "requeue", job["JobId"])


def wait_for_time_limit(slurm, job: dict[str, str]) -> None:
    slurm.call("scontrol", "update", f"jobid={job['JobId']}", "timelimit=1")


FAULTS = [cancel, kill_processes, take_node_away, requeue, wait_for_time_limit]


@pytest.mark.parametrize("fault", FAULTS)
def test_d41_a_job_that_is_lost_goes_on_from_its_checkpoint(slurm, slurm_study, tmp_path, fault):
    folder, _ = slurm_study
    steps = 900 if fault is wait_for_time_limit else 60
    overlay = tmp_path / "longer.yaml"
    # A drafter of its own for every fault.
    training = {"steps": steps, "checkpoint_every": 3, "weight_decay": 0.001 * (1 + FAULTS.index(fault))}
    overlay.write_text(yaml.safe_dump({"drafters": {"generalist_dflash": {"training": training}}}))
    drafter = Plan(load(*CONFIGS, overlay)).drafter("generalist_dflash-s0").id
    wanted, checkpoint = f"results/drafters/{drafter}", f"results/state/{drafter}/checkpoint.safetensors"
    before = {job["JobId"] for job in slurm.jobs()}
    with subprocess.Popen(
        slurm.command(folder, wanted, overlays=(overlay,)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as snakemake:
        try:
            deadline = time.monotonic() + 120
            while not (folder / checkpoint).exists():
                assert snakemake.poll() is None and time.monotonic() < deadline, "no checkpoint was written"
                time.sleep(0.05)
            (job,) = [job for job in slurm.jobs() if job["JobId"] not in before]
            fault(slurm, job)
            output, _ = snakemake.communicate(timeout=600)
        finally:
            snakemake.kill()
    assert snakemake.returncode == 0, output[-4000:]
    log = (folder / f"results/logs/train_drafter/{drafter}.log").read_text()
    assert "resumed from the checkpoint at step" in log
    assert pd.read_csv(folder / wanted / "training.csv")["step"].tolist() == list(range(steps))
    jobs = [job for job in slurm.jobs() if job["JobId"] not in before]
    if fault is requeue:
        assert [job["Restarts"] for job in jobs] == ["1"]
    else:
        # The second submission asks for more.
        assert [job["MinMemoryNode"] for job in jobs] == ["6000M", "12000M"], jobs
        assert [job["JobState"] for job in jobs][1] == "COMPLETED" != jobs[0]["JobState"]
