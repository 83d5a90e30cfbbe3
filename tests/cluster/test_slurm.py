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


def cancel(slurm, job: dict[str, str], drafter: str) -> None:
    slurm.call("scancel", job["JobId"])


def processes_of(drafter: str) -> list[psutil.Process]:
    """The process that trains a drafter."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "train_drafter" in command and f"results/drafters/{drafter}" in command:
            found.append(process)
    return found


def kill_process(slurm, job: dict[str, str], drafter: str) -> None:
    """What the kernel does when memory runs out."""
    for process in processes_of(drafter):
        process.kill()


def requeue(slurm, job: dict[str, str], drafter: str) -> None:
    """What preemption does."""
    slurm.call("scontrol", "requeue", job["JobId"])


def hang(slurm, job: dict[str, str], drafter: str) -> None:
    """A job that hangs until its time is over, after a minute."""
    for process in processes_of(drafter):
        process.suspend()
    slurm.call("scontrol", "update", f"jobid={job['JobId']}", "timelimit=1")


def take_node_away(slurm, job: dict[str, str], drafter: str) -> None:
    """With everything that runs there; the submitting Snakemake, which has the profile on its command line, stays."""
    slurm.node("down")
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if drafter in command and "--workflow-profile" not in command:
            process.kill()
    slurm.node("up")


def train_under_faults(slurm, folder: Path, overlay: Path, faults: dict) -> None:
    """Train drafters (name -> fault) on Slurm, each hit once as soon as it has a checkpoint; all must end whole."""
    plan = Plan(load(*CONFIGS, overlay))
    ids = {name: plan.drafter(name).id for name in faults}
    before = {job["JobId"] for job in slurm.jobs()}

    def jobs_of(name: str) -> list[dict[str, str]]:
        made = [job for job in slurm.jobs() if job["JobId"] not in before]
        return [job for job in made if ids[name] in job["Comment"]]

    command = slurm.command(folder, *(f"results/drafters/{id}" for id in ids.values()), overlays=(overlay,))
    left = dict(faults)
    with (
        (folder / "faults.log").open("w+") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as snakemake,
    ):
        try:
            deadline = time.monotonic() + 600
            while left:
                assert snakemake.poll() is None and time.monotonic() < deadline, f"never hit: {set(left)}"
                for name in list(left):
                    if (folder / f"results/state/{ids[name]}/checkpoint.safetensors").exists():
                        left.pop(name)(slurm, jobs_of(name)[-1], ids[name])
                time.sleep(0.05)
            while snakemake.poll() is None and time.monotonic() < deadline:
                for job in slurm.jobs():
                    # Slurm lets a job wait two minutes before it begins again. Begun before its old steps end, it
                    # is a second copy to slurmd, and the node is drained.
                    waits = job["JobState"] == "PENDING" and job["Reason"] == "BeginTime"
                    if waits and not slurm.runs_still(job):
                        slurm.call("scontrol", "update", f"jobid={job['JobId']}", "starttime=now")
                time.sleep(1)
            assert snakemake.poll() == 0, (folder / "faults.log").read_text()[-4000:]
        finally:
            snakemake.kill()
    for name, fault in faults.items():
        steps = plan.runs[name].recipe.training.steps
        log = (folder / f"results/logs/train_drafter/{ids[name]}.log").read_text()
        assert "resumed from the checkpoint at step" in log, name
        training = pd.read_csv(folder / f"results/drafters/{ids[name]}/training.csv")
        assert training["step"].tolist() == list(range(steps)), name
        jobs = jobs_of(name)
        if fault is requeue:
            assert [job["Restarts"] for job in jobs] == ["1"]
        elif fault is not take_node_away:
            # The second submission asks for more.
            assert [job["MinMemoryNode"] for job in jobs] == ["6000M", "12000M"], jobs
            assert [minutes(job["TimeLimit"]) for job in jobs][1] == 960
            assert jobs[1]["JobState"] == "COMPLETED" != jobs[0]["JobState"]


def test_d41_lost_jobs_go_on_from_their_checkpoints(slurm, slurm_copy, tmp_path):
    overlay = tmp_path / "longer.yaml"
    training = {"checkpoint_every": 3, "steps": 120}
    overlay.write_text(
        yaml.safe_dump({"drafters": {"generalist_dflash": {"seeds": [0, 1, 2, 3, 4], "training": training}}})
    )
    faults = {
        "generalist_dflash-s1": hang,
        "generalist_dflash-s2": requeue,
        "generalist_dflash-s3": cancel,
        "generalist_dflash-s4": kill_process,
    }
    train_under_faults(slurm, slurm_copy, overlay, faults)


def test_d41_a_job_whose_node_is_lost_goes_on_from_its_checkpoint(slurm, slurm_copy, tmp_path):
    overlay = tmp_path / "longer.yaml"
    training = {"checkpoint_every": 3, "steps": 121}
    overlay.write_text(yaml.safe_dump({"drafters": {"generalist_dflash": {"training": training}}}))
    train_under_faults(slurm, slurm_copy, overlay, {"generalist_dflash-s0": take_node_away})
