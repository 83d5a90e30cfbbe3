"""Profiles: which one is loaded by itself, what each sets, and that a killed run is taken up by the same command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yte

REPOSITORY = Path(__file__).resolve().parents[2]
PROFILES = REPOSITORY / "workflow/profiles"
NAMES = sorted(path.name for path in PROFILES.iterdir())
# Rules with models; all but the two last on a GPU where there is one.
HEAVY = {"prepare_set", "generate_responses", "train_drafter", "check_lossless", "score_pool", "decode_live"}
HEAVY |= {"profile_decode", "profile_costs"}


def profile(name: str, monkeypatch=None) -> dict:
    with (PROFILES / name / "config.yaml").open() as handle:
        return yte.process_yaml(handle, require_use_yte=True)


def test_the_profiles_are_these():
    assert NAMES == ["default", "gpu", "kubernetes", "slurm"]


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_takes_up_killed_runs_and_every_line_is_explained(name):
    made = profile(name)
    assert made["rerun-incomplete"] is True and made["nolock"] is True and made["scheduler"] == "greedy"
    readme = (REPOSITORY / "README.md").read_text()
    if name != "default":
        assert f"--workflow-profile workflow/profiles/{name}" in readme
    lines = (PROFILES / name / "config.yaml").read_text().splitlines()
    # A line is explained at its end, or by a comment above it or above its block.
    block_explained = False
    for before, line in zip(["", *lines], lines, strict=False):
        if not line.strip() or line.lstrip().startswith(("#", "?if", "- ")):
            continue
        explained = " # " in line or before.lstrip().startswith(("#", "?if"))
        if not line.startswith(" "):
            block_explained = explained
        assert explained or block_explained or "__use_yte__" in before, line


def test_the_default_profile_says_nothing_that_a_site_decides():
    """It is stronger than `--profile`."""
    assert set(profile("default")) == {"scheduler", "rerun-incomplete", "nolock", "report-stylesheet"}


def test_d45_d47_the_slurm_profile_asks_for_gpus_by_rule_and_waits_for_network_disks(monkeypatch):
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    monkeypatch.delenv("DRAFTPOOL_GPUS", raising=False)
    monkeypatch.delenv("DRAFTPOOL_TRAINING_GPUS", raising=False)
    made = profile("slurm")
    asked = made["set-resources"]
    assert {rule for rule, wanted in asked.items() if wanted.get("gpu")} == HEAVY
    assert all("attempt" in str(wanted["mem_mb"]) for wanted in asked.values())
    assert made["latency-wait"] >= 30 and made["retries"] >= 1 and made["slurm-requeue"] is True
    assert made["slurm-no-account"] is True and "slurm_partition" not in made["default-resources"]
    monkeypatch.setenv("DRAFTPOOL_GPUS", "0")
    monkeypatch.setenv("DRAFTPOOL_TRAINING_GPUS", "4")
    asked = profile("slurm")["set-resources"]
    assert {rule: wanted["gpu"] for rule, wanted in asked.items() if wanted.get("gpu")} == {
        "train_drafter": 4
    }
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    made = profile("slurm")
    assert made["default-resources"]["slurm_partition"] == "long"
    assert made["default-resources"]["slurm_account"] == "lab" and "slurm-no-account" not in made


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_default_profile_is_loaded_by_itself(new_checkout, tmp_path, elsewhere):
    where = (
        ["--snakefile", str(new_checkout.root / "Snakefile"), "--directory", str(tmp_path)]
        if elsewhere
        else []
    )
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", *where],
        cwd=tmp_path if elsewhere else new_checkout.root,
        env=new_checkout.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "profiles/default for setting default" in done.stderr


@pytest.mark.parametrize("name", ["gpu", "slurm"])
def test_a_dry_run_with_a_profile_plans_the_study(new_checkout, name):
    if name == "slurm":
        pytest.importorskip("snakemake_executor_plugin_slurm")
    done = new_checkout.snakemake(
        "-n", "--executor", "dryrun", "--workflow-profile", f"workflow/profiles/{name}"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_snakemake_knows_every_line_of_the_kubernetes_profile(monkeypatch):
    """Read as the command line would be; more needs a cluster."""
    pytest.importorskip("snakemake_executor_plugin_kubernetes")
    pytest.importorskip("snakemake_storage_plugin_s3")
    from snakemake.cli import get_argument_parser

    for name in ("SNAKEMAKE_STORAGE_S3_ACCESS_KEY", "SNAKEMAKE_STORAGE_S3_SECRET_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    read = get_argument_parser(profiles=[str(PROFILES / "kubernetes")]).parse_args([])
    assert read.executor == "kubernetes" and read.jobs == 20
    assert read.set_resources["train_drafter"]["gpu"].value == 1
    assert read.default_storage_provider == "s3" and not read.envvars
    monkeypatch.setenv("HF_TOKEN", "secret")
    read = get_argument_parser(profiles=[str(PROFILES / "kubernetes")]).parse_args([])
    assert list(read.envvars) == ["HF_TOKEN"]


def test_d41_a_killed_run_is_taken_up_by_the_same_command(new_checkout, tmp_path):
    checkout = new_checkout.copy(tmp_path / "checkout")
    pretend = checkout.root / "pretend/draftpool"
    quick = pretend.read_text()
    started = tmp_path / "started"
    pretend.write_text(
        quick.replace(
            "out = flags.out\n",
            f"""out = flags.out
import time
if flags.command == "generate_responses":
    out.mkdir()
    (out / "half").write_text("written")
    Path({str(started)!r}).touch()
    time.sleep(120)
""",
        )
    )
    command = [sys.executable, "-m", "snakemake", "--cores", "2"]
    with subprocess.Popen(
        command,
        cwd=checkout.root,
        env=checkout.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as snakemake:
        deadline = time.monotonic() + 120
        while not started.exists():
            assert snakemake.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        # A second run keeps away, in one line.
        second = checkout.snakemake("--cores", "2")
        assert second.returncode != 0
        assert "draftpool: error: results: another snakemake is working here" in second.stdout + second.stderr
        assert "Traceback" not in second.stdout + second.stderr
        os.killpg(snakemake.pid, signal.SIGKILL)
    pretend.write_text(quick)
    assert "Figures and tables:" in checkout.run()
    assert not list((checkout.root / "results").rglob("half"))
