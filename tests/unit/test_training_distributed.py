"""Training in several processes, started by the real command under torch's launcher, over gloo."""

from __future__ import annotations

import dataclasses
import os
import signal

import numpy as np
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
from training_runs import alone, assert_close, assert_equal, cfg_of, log_of

from draftpool.artefacts import read_json
from draftpool.targets.fetch import fetch_target
from draftpool.training import launch


@pytest.fixture(scope="module")
def world(llama_world, tmp_path_factory):
    """The world of a tiny Llama, its target fetched, so that most jobs need not import transformers."""
    target = tmp_path_factory.mktemp("fetched") / "target"
    fetch_target({"source": "path", "path": str(llama_world.target)}, target)
    return dataclasses.replace(llama_world, target=target)


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
def test_two_processes_take_the_steps_of_one(kind, objective, accumulate, world, tmp_path) -> None:
    cfg = cfg_of(kind, objective)
    job = start(world, tmp_path, "two", cfg, "--processes", "2", "--accumulate", str(accumulate))
    one = alone(world, tmp_path, cfg)
    status, printed = finish(job)
    assert status == 0 and not errors_in(printed), printed
    assert_close(one, tmp_path / "two")
    told = read_json(tmp_path / "two" / "provenance.json")
    assert (told["processes"], told["accumulate"]) == (2, accumulate)
    # One process writes, and shows the one bar.
    assert printed.count("5/5") == 1 and not (tmp_path / "state" / "two").exists()


def test_two_processes_in_bfloat16_round_as_one_does(world, tmp_path) -> None:
    """Every part's products are rounded on their own, so this agrees less closely; sums and steps are float32."""
    cfg = cfg_of(precision="bfloat16")
    job = start(world, tmp_path, "two", cfg, "--processes", "2", "--accumulate", "2")
    one = log_of(alone(world, tmp_path, cfg))
    status, printed = finish(job)
    assert status == 0, printed
    two = log_of(tmp_path / "two")
    assert read_json(tmp_path / "two" / "provenance.json")["bfloat16"]
    for name in ("loss", "grad_norm", "confidence_1"):
        np.testing.assert_allclose(one[name], two[name], rtol=0.05)
    weights = load_file(tmp_path / "two" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}


# Snakemake tells jobs how they are split by a variable.
SPLIT = {"DRAFTPOOL_SPLITS": '{"run": [2, 2], "whole": [2, 2]}'}


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """An uninterrupted run of 7 steps in two processes."""
    root = tmp_path_factory.mktemp("whole")
    status, printed = finish(start(world, root, "whole", cfg_of(steps=7, checkpoint_every=4), **SPLIT))
    assert status == 0, printed
    return root / "whole"


def test_two_processes_are_told_to_stop_and_resume_bit_equal(whole, world, tmp_path) -> None:
    """SIGTERM at one process in its step 5 (counted from 0), which both end and save."""
    cfg = cfg_of(steps=7, checkpoint_every=4)
    job = start(world, tmp_path, "run", cfg, patch=at_step(5, TERMINATE, rank=1), **SPLIT)
    status, printed = finish(job)
    assert status == 130 and errors_in(printed) == [INTERRUPTED], printed
    assert not (tmp_path / "run").exists()
    status, printed = finish(start(world, tmp_path, "run", cfg, **SPLIT))
    assert status == 0 and printed.count("resumed from the checkpoint at step 6") == 1, printed
    assert_equal(tmp_path / "run", whole)


def test_a_killed_process_ends_the_job_and_the_rerun_goes_on(whole, world, tmp_path) -> None:
    cfg = cfg_of(steps=7, checkpoint_every=4)
    status, printed = finish(start(world, tmp_path, "run", cfg, patch=at_step(5, KILL, rank=1), **SPLIT))
    assert status == 1 and not (tmp_path / "run").exists()
    (line,) = errors_in(printed)
    assert line.startswith("draftpool: error: train_drafter: process 2 of 2 was ended by SIGKILL -> ")
    status, printed = finish(start(world, tmp_path, "run", cfg, **SPLIT))
    assert status == 0 and "resumed from the checkpoint at step 4" in printed, printed
    assert_equal(tmp_path / "run", whole)


def test_a_checkpoint_of_another_split_is_not_taken(world, tmp_path, capsys) -> None:
    """It has other rounding; both ends agree up to that."""
    cfg = cfg_of(steps=7, checkpoint_every=4, lr=1e-4)
    expected = alone(world, tmp_path, cfg)
    patch = at_step(5, "raise MemoryError")
    assert finish(start(world, tmp_path, "run", cfg, "--accumulate", "5", patch=patch))[0] == 1
    assert (tmp_path / "state" / "run" / "checkpoint.safetensors").exists()
    assert_equal(alone(world, tmp_path, cfg, 1, "run"), expected)
    assert "resumed" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_launcher(number, world, tmp_path) -> None:
    cfg = cfg_of(steps=10**6, checkpoint_every=2)
    job = start(world, tmp_path, "run", cfg, "--processes", "2")
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
                "draftpool: error: train_drafter: process 2 of 2 failed (ZeroDivisionError: of mine) -> "
                "see the traceback above"
            ],
        ),
    ],
    ids=["one process", "all processes", "a bug"],
)
def test_an_error_is_told_once(action, rank, status, told, world, tmp_path) -> None:
    patch = at_step(2, action, rank)
    job = start(world, tmp_path, "run", cfg_of(), "--processes", "2", patch=patch)
    found, printed = finish(job)
    # A bug leaves its traceback, of the process that met it alone.
    assert printed.count("Traceback (most recent call last)") == int(status == 1)
    own = [line for line in errors_in(printed) if not line.startswith("[rank1]: ")]
    assert found == status and own == told, printed
    assert not (tmp_path / "run").exists()


def test_a_second_copy_of_a_shared_job_is_refused(world, tmp_path) -> None:
    cfg = cfg_of(steps=10**6, checkpoint_every=2)
    job = start(world, tmp_path, "run", cfg, "--processes", "2")
    wait_for(tmp_path / "state" / "run" / "checkpoint.safetensors", job)
    status, printed = finish(start(world, tmp_path, "run", cfg, "--processes", "2"))
    assert status == 2 and [line for line in errors_in(printed) if "another copy" in line] == errors_in(
        printed
    )
    assert job.poll() is None
    os.kill(job.pid, signal.SIGTERM)
    assert finish(job)[0] == 130


def test_d33_a_process_told_to_stop_ends_its_step_and_resumes_bit_equal(world, tmp_path) -> None:
    """One process: SIGTERM to the job at step 7 of 20."""
    cfg = cfg_of(steps=20, checkpoint_every=100, precision="auto")
    job = start(world, tmp_path, "run", cfg, patch=at_step(7, TERMINATE))
    status, printed = finish(job)
    assert status == 130 and errors_in(printed) == [INTERRUPTED] and not (tmp_path / "run").exists(), printed
    checkpoint = tmp_path / "state" / "run" / "checkpoint.safetensors"
    assert checkpoint.exists() and "stopping when this step has ended" in printed
    status, printed = finish(start(world, tmp_path, "run", cfg))
    assert status == 0 and "resumed from the checkpoint at step 8" in printed, printed
    assert not checkpoint.exists()
    assert_equal(tmp_path / "run", alone(world, tmp_path, cfg))
    assert psutil.Process().children() == []


@pytest.mark.parametrize(
    ("reports", "failures", "line", "status"),
    [
        ([], {0: 130}, "interrupted", 130),
        ([], {0: 130, 1: -15}, "interrupted", 130),
        ([{"kind": "peer", "rank": 1, "message": "m"}], {0: -2}, "interrupted", 130),
        ([], {0: -9, 1: 130}, "error: train_drafter: process 1 of 2 was ended by SIGKILL", 1),
        ([{"kind": "peer", "rank": 0, "message": "m"}], {1: -11}, "process 2 of 2 was ended by SIGSEGV", 1),
        ([{"kind": "peer", "rank": 0, "message": "m"}], {0: 1}, "process 1 of 2 lost the others (m)", 1),
        (
            [{"kind": "peer", "rank": 0, "message": "m"}, {"kind": "error", "rank": 1, "message": "e"}],
            {0: 1},
            "error: e",
            2,
        ),
        (
            [{"kind": "crash", "rank": 1, "message": "x"}, {"kind": "error", "rank": 1, "message": "e"}],
            {1: -9},
            "error: e",
            2,
        ),
        ([{"kind": "crash", "rank": 1, "message": "x"}], {0: 130}, "process 2 of 2 failed (x)", 1),
        ([], {1: 3}, "process 2 of 2 ended with status 3", 1),
    ],
)
def test_the_cause_is_told_not_its_consequences(reports, failures, line, status) -> None:
    told, found = launch._cause(reports, failures, 2)
    assert line in told and found == status
