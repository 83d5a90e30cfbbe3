"""D-47: which GPU a job gets, by file lock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from draftpool.errors import DraftpoolError
from draftpool.gpus import claim_gpus, visible_gpus

JOB = """
import os, sys, time
from draftpool.gpus import claim_gpus
with claim_gpus(int(sys.argv[1])) as held:
    started = time.monotonic()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(held)
    time.sleep(0.5)
    print(",".join(held), started, time.monotonic())
"""


@pytest.fixture(autouse=True)
def own_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def run_jobs(sizes: list[int], devices: str) -> list[tuple[list[str], float, float]]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": devices}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(n)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for n in sizes
    ]
    lines = [job.communicate(timeout=60)[0].split() for job in jobs]
    assert not any(job.returncode for job in jobs)
    return [(held.split(","), float(start), float(end)) for held, start, end in lines]


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 1, 2, 1]])
def test_d47_no_device_is_held_twice_and_all_are_used(sizes):
    made = run_jobs(sizes, "0,GPU-5f1e")
    assert [len(held) for held, _, _ in made] == sizes
    for device in ("0", "GPU-5f1e"):
        spans = sorted((start, end) for held, start, end in made if device in held)
        assert len(spans) >= 2
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)), (
            f"two jobs held {device} at once"
        )


def test_a_killed_job_gives_its_device_back(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    hold = (
        "import time; from draftpool.gpus import claim_gpus\n"
        "with claim_gpus(1): print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as job:
        assert job.stdout.readline()
        job.kill()
        job.wait(timeout=10)
    with claim_gpus(1) as held:
        assert held == ["0"]


def test_allocations_of_slurm_number_their_own_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with claim_gpus(1):
        monkeypatch.setenv("SLURM_JOB_ID", "18")
        with claim_gpus(1) as held:
            assert held == ["0"]


@pytest.mark.parametrize("listed", ["", "-1", "NoDevFiles"])
def test_without_gpus_nothing_is_held(monkeypatch, listed):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == []
    with claim_gpus(1) as held:
        assert held == []
    assert os.environ["CUDA_VISIBLE_DEVICES"] == listed


def test_more_gpus_than_there_are_end_in_one_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(DraftpoolError, match="3 GPUs are needed, 2 visible"), claim_gpus(3):
        pass
