"""Training in several processes, started by the real command under torch's launcher, over gloo."""

from __future__ import annotations

import os
import signal

import pandas as pd
import psutil
import pytest
import torch
from jobs import (
    INTERRUPTED,
    KILL,
    TERMINATE,
    at_step,
    children,
    errors_in,
    finish,
    gone,
    rank_of,
    start,
    wait_for,
)
from safetensors.torch import load_file
from tiny import training_cfg

from draftpool.artefacts import read_json
from draftpool.training.train import train_drafter

TIMING = ["step_time", "tokens_per_s"]
STEPS = 5
MODELS = {
    "block": {"n_layers": 2, "block_size": 4, "draft_vocab": 60},
    "eagle": {"draft_tokens": 3, "draft_vocab": 60, "own_head": False},
    "independent": {"n_layers": 2, "layers": None, "draft_tokens": 3, "draft_vocab": None},
}


def cfg_of(kind: str = "block", objective: dict | None = None, steps: int = STEPS, **training) -> dict:
    """A training in float32: what agrees up to rounding shows it there."""
    objective = objective or {"kind": "dpace", "alpha": 0.5, "reduction": "anchor_mean"}
    cfg = training_cfg(steps, objective, model=MODELS[kind], domains=["tales", "sums"])
    cfg["training"] |= {"lr": 3e-4, "precision": "float32", "batch_sequences": 5} | training
    return cfg | {"kind": kind, "init": "target_layers"}


def alone(world, root, cfg: dict, accumulate: int = 1, name: str = "alone"):
    """The same training in this process."""
    train_drafter(cfg, world.target, world.train, None, root / "state" / name, root / name, accumulate)
    return root / name


def log_of(folder) -> pd.DataFrame:
    return pd.read_csv(folder / "training.csv").drop(columns=TIMING)


def assert_close(one, two) -> None:
    """Weights and logs agree within 1e-5 (losses relative to their size)."""
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=0.0, atol=1e-5)
    pd.testing.assert_frame_equal(log_of(one), log_of(two), check_exact=False, rtol=1e-5, atol=1e-6)
    first, second = (read_json(folder / "provenance.json") for folder in (one, two))
    for name in ("initial_parameters", "data_order", "sequences", "vocabulary_coverage"):
        assert first[name] == second[name]


def assert_equal(one, two) -> None:
    """Weights and logs are the same bit by bit."""
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert weights.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    pd.testing.assert_frame_equal(log_of(one), log_of(two), check_exact=True)


@pytest.mark.parametrize(
    ("kind", "objective", "accumulate"),
    [
        # An odd batch of 5: shares of 3 and 2, micro-batches of 2 + 1 and 1 + 1.
        ("block", {"kind": "dpace", "alpha": 0.5, "reduction": "anchor_mean"}, 2),
        ("block", {"kind": "direct_surrogate", "reduction": "published"}, 1),
        ("eagle", {"kind": "cross_entropy", "decay": 0.8, "reduction": "weight_mean"}, 1),
        ("independent", {"kind": "forward_kl", "reduction": "sequence_sum"}, 1),
    ],
)
def test_two_processes_take_the_steps_of_one(kind, objective, accumulate, llama_world, tmp_path) -> None:
    cfg = cfg_of(kind, objective)
    job = start(llama_world, tmp_path, "two", cfg, "--processes", "2", "--accumulate", str(accumulate))
    one = alone(llama_world, tmp_path, cfg)
    status, printed = finish(job)
    assert status == 0 and not errors_in(printed), printed
    assert_close(one, tmp_path / "two")
    told = read_json(tmp_path / "two" / "provenance.json")
    assert (told["processes"], told["accumulate"]) == (2, accumulate)
    # One process writes, and shows the one bar.
    assert printed.count("5/5") == 1 and not (tmp_path / "state" / "two").exists()


@pytest.mark.parametrize("kind", list(MODELS))
def test_micro_batches_take_the_steps_of_a_whole_batch(kind, llama_world, tmp_path) -> None:
    objective = {"kind": "tvd", "reduction": "weight_mean"}
    cfg = cfg_of(kind, objective, batch_sequences=7)
    whole = alone(llama_world, tmp_path, cfg)
    for accumulate in (3, 7):
        assert_close(whole, alone(llama_world, tmp_path, cfg, accumulate, f"cut-{accumulate}"))


def test_two_processes_are_told_to_stop_and_resume_bit_equal(llama_world, tmp_path) -> None:
    """SIGTERM at one process at step 3; the rerun goes on from there, under a launcher told by Snakemake's variable."""
    cfg = cfg_of(steps=7, checkpoint_every=100)
    splits = {"DRAFTPOOL_SPLITS": '{"run": [2, 1], "whole": [2, 1]}'}
    job = start(llama_world, tmp_path, "run", cfg, patch=at_step(3, TERMINATE, rank=1), **splits)
    status, printed = finish(job)
    assert status == 130 and errors_in(printed) == [INTERRUPTED], printed
    assert not (tmp_path / "run").exists()
    status, printed = finish(start(llama_world, tmp_path, "run", cfg, **splits))
    assert status == 0 and printed.count("resumed from the checkpoint at step 4") == 1, printed
    status, printed = finish(start(llama_world, tmp_path, "whole", cfg, **splits))
    assert status == 0 and "resumed" not in printed
    assert_equal(tmp_path / "run", tmp_path / "whole")


def test_a_killed_process_ends_the_job_and_the_rerun_goes_on(llama_world, tmp_path) -> None:
    cfg = cfg_of(steps=7, checkpoint_every=2)
    job = start(llama_world, tmp_path, "run", cfg, "--processes", "2", patch=at_step(5, KILL, rank=1))
    status, printed = finish(job)
    assert status == 1 and not (tmp_path / "run").exists()
    (line,) = errors_in(printed)
    assert line.startswith("draftpool: error: train_drafter: process 2 of 2 was ended by SIGKILL -> ")
    # Another split has other rounding: its checkpoint is another run's.
    status, printed = finish(start(llama_world, tmp_path, "run", cfg, "--processes", "2"))
    assert status == 0 and "resumed from the checkpoint at step 4" in printed, printed
    assert_close(alone(llama_world, tmp_path, cfg), tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_launcher(number, llama_world, tmp_path) -> None:
    cfg = cfg_of(steps=10**6, checkpoint_every=2)
    job = start(llama_world, tmp_path, "run", cfg, "--processes", "2")
    wait_for(tmp_path / "state" / "run" / "checkpoint.safetensors", job)
    ranks = [one for one in children(job) if "draftpool.cli" in one.cmdline()]
    assert sorted(map(rank_of, ranks)) == [0, 1]
    job.send_signal(number)
    printed, _ = job.communicate(timeout=30)
    gone(ranks)
    assert job.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert errors_in(printed) == ([] if number == signal.SIGKILL else [INTERRUPTED])
    assert (tmp_path / "state" / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("action", "rank", "status", "told"),
    [
        (
            "from draftpool.errors import DraftpoolError; raise DraftpoolError('wrong', 'here', 'mend it')",
            1,
            2,
            ["draftpool: error: here: wrong -> mend it"],
        ),
        (
            "from draftpool.errors import DraftpoolError; raise DraftpoolError('wrong', 'here', 'mend it')",
            None,
            2,
            ["draftpool: error: here: wrong -> mend it"],
        ),
        (
            "raise ZeroDivisionError('of mine')",
            1,
            1,
            [
                "Traceback (most recent call last):",
                "ZeroDivisionError: of mine",
                "draftpool: error: train_drafter: process 2 of 2 failed (ZeroDivisionError: of mine) -> "
                "see the traceback above",
            ],
        ),
    ],
    ids=["one process", "all processes", "a bug"],
)
def test_an_error_is_told_once(action, rank, status, told, llama_world, tmp_path) -> None:
    patch = at_step(2, action, rank)
    job = start(llama_world, tmp_path, "run", cfg_of(), "--processes", "2", patch=patch)
    found, printed = finish(job)
    assert found == status and errors_in(printed) == told, printed
    assert not (tmp_path / "run").exists()


def test_a_second_copy_of_a_shared_job_is_refused(llama_world, tmp_path) -> None:
    cfg = cfg_of(steps=10**6, checkpoint_every=2)
    job = start(llama_world, tmp_path, "run", cfg, "--processes", "2")
    wait_for(tmp_path / "state" / "run" / "checkpoint.safetensors", job)
    status, printed = finish(start(llama_world, tmp_path, "run", cfg, "--processes", "2"))
    assert status == 2 and [line for line in errors_in(printed) if "another copy" in line] == errors_in(
        printed
    )
    assert job.poll() is None
    os.kill(job.pid, signal.SIGTERM)
    assert finish(job)[0] == 130


def test_d33_a_process_told_to_stop_ends_its_step_and_resumes_bit_equal(llama_world, tmp_path) -> None:
    """One process: SIGTERM to the job at step 7 of 20."""
    cfg = cfg_of(steps=20, checkpoint_every=100, precision="auto")
    job = start(llama_world, tmp_path, "run", cfg, patch=at_step(7, TERMINATE))
    status, printed = finish(job)
    assert status == 130 and errors_in(printed) == [INTERRUPTED] and not (tmp_path / "run").exists(), printed
    checkpoint = tmp_path / "state" / "run" / "checkpoint.safetensors"
    assert checkpoint.exists() and "stopping when this step has ended" in printed
    status, printed = finish(start(llama_world, tmp_path, "run", cfg))
    assert status == 0 and "resumed from the checkpoint at step 8" in printed
    assert not checkpoint.exists()
    assert_equal(tmp_path / "run", alone(llama_world, tmp_path, cfg))
    assert psutil.Process().children() == []
