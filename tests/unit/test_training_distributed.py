"""Training in several processes, started by the real command under torch's launcher, over gloo."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import signal

import numpy as np
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
from tiny import VOCABULARY, training_cfg

from draftpool.artefacts import read_json
from draftpool.registry import list_registered, load_registered
from draftpool.targets.fetch import fetch_target
from draftpool.targets.tail import load_tail
from draftpool.training import launch
from draftpool.training.batches import ResponseSet, make_batch, parts_of
from draftpool.training.gradients import FlatGradients
from draftpool.training.objectives.base import DECORATOR, PACKAGE, LossSums, make_objective
from draftpool.training.train import batch_loss, batch_sums, train_drafter
from draftpool.training.trainees import new_trainee

CPU = torch.device("cpu")
TIMING = ["step_time", "tokens_per_s"]
STEPS = 5
MODELS = {
    "block": {"n_layers": 2, "block_size": 4, "draft_vocab": 60},
    "eagle": {"draft_tokens": 3, "draft_vocab": 60, "own_head": False},
    "independent": {"n_layers": 2, "layers": None, "draft_tokens": 3, "draft_vocab": None},
}


@pytest.fixture(scope="module")
def world(llama_world, tmp_path_factory):
    """The world of a tiny Llama, its target fetched, so that most jobs need not import transformers."""
    target = tmp_path_factory.mktemp("fetched") / "target"
    fetch_target({"source": "path", "path": str(llama_world.target)}, target)
    return dataclasses.replace(llama_world, target=target)


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


# Every divisor: sequences with an anchor, sequences, weights that are fixed and weights that are not.
OBJECTIVES = [
    ("block", {"kind": "dpace", "alpha": 0.5, "reduction": "anchor_mean"}),
    ("block", {"kind": "dpace_continuation", "alpha": 0.5, "reduction": "published"}),
    ("block", {"kind": "dflash", "reduction": "published"}),
    ("block", {"kind": "direct_surrogate", "reduction": "anchor_mean"}),
    ("block", {"kind": "direct_surrogate", "reduction": "sequence_sum"}),
    ("block", {"kind": "tvd", "reduction": "weight_mean"}),
    ("eagle", {"kind": "cross_entropy", "decay": 0.8, "reduction": "weight_mean"}),
    ("eagle", {"kind": "reverse_kl", "reduction": "anchor_mean"}),
    ("independent", {"kind": "forward_kl", "reduction": "weight_mean"}),
    ("independent", {"kind": "cross_entropy", "reduction": "anchor_mean"}),
]


@pytest.mark.parametrize(("kind", "objective"), OBJECTIVES)
def test_gradients_of_the_parts_add_up_to_that_of_the_whole(kind, objective, world) -> None:
    """A step of 7 sequences, one of which has nothing supervised, in one piece and in 2 x 1, 1 x 3, 3 x 2 and 2 x 5."""
    data, cfg = ResponseSet(world.train, None), cfg_of(kind, objective)
    trainee = new_trainee(cfg, world.target, data, None, CPU)
    made = make_objective(objective, trainee.slots + 1, kind)
    tail = load_tail(world.target, cfg["taps"], CPU) if made.reads_target else None
    columns = np.full(VOCABULARY, -1)
    columns[trainee.vocabulary.numpy()] = np.arange(len(trainee.vocabulary))
    # Nothing of the step's third answer can be proposed, so that its part may have no supervised slot at all.
    barred = make_batch(data, 0, 0, 7, 6, trainee.slots + 1, columns, range(2, 3))
    columns[barred.tokens[0].numpy()] = -1
    gradients = FlatGradients(list(trainee.module.parameters()))

    def taken(processes: int, accumulate: int):
        gradients.clear()
        sums, lengths = [], []
        for process in range(processes):
            for part in parts_of(7, processes, accumulate, process):
                lengths.append(len(part))
                if part:
                    batch = make_batch(data, 0, 0, 7, 6, trainee.slots + 1, columns, part)
                    sums.append(batch_sums(trainee, batch, made, False, tail))
                    if sums[-1].total.requires_grad:
                        sums[-1].total.backward()
        assert sum(lengths) == 7 and len(lengths) == processes * accumulate
        whole = functools.reduce(operator.add, sums)
        told = LossSums.of_numbers(whole.numbers()).report()
        gradients.divide(max(float(whole.divisor), 1e-30))
        return gradients.flat.clone(), told

    batch = make_batch(data, 0, 0, 7, 6, trainee.slots + 1, columns)
    assert not batch.mask[2].any() and batch.mask.any()
    report = batch_loss(trainee, batch, made, False, tail)
    gradients.clear()
    report.loss.backward()
    expected = gradients.flat.clone()
    assert expected.abs().max() > 1e-4
    for split in ((1, 1), (2, 1), (1, 3), (3, 2), (2, 5)):
        flat, told = taken(*split)
        # Relative to the largest entry: small ones are sums that cancel.
        assert (flat - expected).abs().max() <= 1e-5 * expected.abs().max(), split
        for name in ("loss", "confidence", "weight_share"):
            own, whole = getattr(told, name).double(), getattr(report, name).detach().double()
            torch.testing.assert_close(own, whole, rtol=1e-5, atol=1e-7)


def test_parts_cover_a_step_once_and_evenly() -> None:
    for n, processes, accumulate in ((7, 1, 1), (7, 2, 1), (7, 2, 2), (5, 3, 2), (64, 8, 4), (2, 3, 2)):
        shares = [parts_of(n, processes, accumulate, process) for process in range(processes)]
        assert [place for share in shares for part in share for place in part] == list(range(n))
        sizes = [sum(map(len, share)) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        for share in shares:
            assert len(share) == accumulate and max(map(len, share)) - min(map(len, share)) <= 1


def test_a_part_of_a_batch_holds_what_the_whole_batch_holds(world) -> None:
    data, columns = ResponseSet(world.train, None), np.arange(VOCABULARY)
    for step in range(3):
        whole = make_batch(data, step, 0, 5, 6, 4, columns)
        for part in (range(0, 2), range(2, 5), range(4, 5)):
            cut = make_batch(data, step, 0, 5, 6, 4, columns, part)
            assert cut.order_hash == whole.order_hash and len(cut.taps) == len(part)
            length = cut.taps.shape[1]
            assert torch.equal(cut.taps, whole.taps[part.start : part.stop, :length])
            assert torch.equal(cut.tokens, whole.tokens[part.start : part.stop, : length + 1])
            assert torch.equal(cut.mask, whole.mask[part.start : part.stop])
            assert torch.equal(cut.labels, whole.labels[part.start : part.stop])
            assert torch.equal(cut.anchors, whole.anchors[part.start : part.stop])


def test_weights_of_an_anchor_depend_on_that_anchor_alone() -> None:
    """What makes sums add up: no objective may look across the batch."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 3, generator=generator) < 0.8
    log_q = -3 * torch.rand(6, 3, generator=generator).masked_fill(~mask, 0.0)
    for kind in list_registered(PACKAGE, DECORATOR):
        drafters = load_registered(PACKAGE, DECORATOR, kind).kinds
        made = make_objective({"kind": kind}, 4, sorted(drafters)[0])
        whole = made.weights(log_q, mask).masked_fill(~mask, 0.0)
        for row in range(6):
            own = made.weights(log_q[row : row + 1], mask[row : row + 1]).masked_fill(
                ~mask[row : row + 1], 0.0
            )
            torch.testing.assert_close(own[0], whole[row])


@pytest.mark.parametrize("kind", list(MODELS))
def test_micro_batches_take_the_steps_of_a_whole_batch(kind, world, tmp_path) -> None:
    cfg = cfg_of(kind, {"kind": "forward_kl", "reduction": "weight_mean"}, batch_sequences=7, lr=1e-4)
    whole = alone(world, tmp_path, cfg)
    for accumulate in (3, 7):
        assert_close(whole, alone(world, tmp_path, cfg, accumulate, f"cut-{accumulate}"))


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
