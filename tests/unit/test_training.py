"""Training: batches as pure functions, runs that differ in the loss only, resuming, and clear errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file
from tiny import VOCABULARY, training_cfg

from draftpool.artefacts import read_json, read_table, write_table
from draftpool.errors import DraftpoolError
from draftpool.training import train
from draftpool.training.batches import ResponseSet, block_labels, context_bias, make_batch, sequence_order
from draftpool.training.checkpoint import load_checkpoint, save_checkpoint
from draftpool.training.interruption import SIGNALS, StopRequests
from draftpool.training.train import learning_rate, train_drafter

EVERY_ID = np.arange(VOCABULARY)
SHARD = "taps-00001-of-00001.safetensors"
TIMING = ["step_time", "tokens_per_s"]


@pytest.fixture(scope="module")
def data(llama_world) -> ResponseSet:
    return ResponseSet(llama_world.train, None)


def _batch(data, step: int, seed: int = 0, sequences: int = 4, anchors: int = 6, columns=EVERY_ID):
    return make_batch(data, step, seed, sequences, anchors, 4, columns)


# --- batches --------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    answer=arrays.arrays(np.int64, st.integers(2, 12), elements=st.integers(0, 9)),
    known=st.sets(st.integers(0, 9)),
    slots=st.integers(1, 6),
)
def test_labels_and_mask_equal_a_loop(answer, known, slots) -> None:
    columns = np.full(10, -1)
    columns[sorted(known)] = np.arange(len(known))
    places = np.arange(len(answer) - 1)
    labels, mask = block_labels(answer, places, slots, columns)
    for place in places:
        reachable = True
        for slot in range(slots):
            index = place + 1 + slot
            # Behind the end, or behind a token that cannot be proposed, no slot is ever reached.
            reachable = reachable and index < len(answer) and int(answer[index]) in known
            assert mask[place, slot] == reachable
            assert labels[place, slot] == (columns[answer[index]] if reachable else 0)


def test_batches_are_pure_functions_of_seed_and_step(data) -> None:
    first = [_batch(data, step) for step in range(5)]
    again = [_batch(data, step) for step in reversed(range(5))][::-1]
    for one, two in zip(first, again, strict=True):
        assert one.order_hash == two.order_hash
        for name in ("taps", "anchors", "positions", "bias", "labels", "mask"):
            assert torch.equal(getattr(one, name), getattr(two, name))
    assert len({batch.order_hash for batch in first}) == 5
    assert _batch(data, 0, seed=1).order_hash != first[0].order_hash


def test_every_sequence_is_met_once_an_epoch(data) -> None:
    n = len(data)
    for epoch in range(3):
        assert sorted(sequence_order(n, 5, epoch)) == list(range(n))
    assert sequence_order(n, 5, 0).tolist() != sequence_order(n, 5, 1).tolist()
    assert sequence_order(n, 5, 0).tolist() != sequence_order(n, 6, 0).tolist()


@pytest.mark.parametrize("anchors", [3, 40])
def test_a_batch_equals_what_the_tables_say(data, anchors, llama_world) -> None:
    n, sequences = len(data), 3
    taps_files = [load_file(path / SHARD)["taps"] for path in llama_world.train]
    supervised = padding = 0
    for step in range(6):
        batch = _batch(data, step, sequences=sequences, anchors=anchors)
        for row, place in enumerate(range(step * sequences, (step + 1) * sequences)):
            entry = data.rows.iloc[int(sequence_order(n, 0, place // n)[place % n])]
            text = [*entry.prompt_ids, *entry.response_ids]
            length = len(text) - 1
            stored = taps_files[entry.folder][entry.prompt_offset : entry.prompt_offset + length].float()
            assert torch.equal(batch.taps[row, :length], stored) and not batch.taps[row, length:].any()
            wanted = min(anchors, len(entry.response_ids) - 1)
            positions = batch.positions[row].tolist()
            assert sorted(set(positions[:wanted])) == positions[:wanted]
            for number, position in enumerate(positions):
                visible = batch.bias[row, number] == 0
                assert visible.tolist() == [index < position for index in range(batch.taps.shape[1])]
                if number >= wanted:
                    assert not batch.mask[row, number].any() and position == length
                    padding += 1
                    continue
                # An anchor is a token of the answer that has one behind it.
                assert len(entry.prompt_ids) <= position < length
                assert batch.anchors[row, number] == text[position]
                for slot in range(3):
                    inside = position + 1 + slot < len(text)
                    assert batch.mask[row, number, slot] == inside
                    assert batch.labels[row, number, slot] == (text[position + 1 + slot] if inside else 0)
                    supervised += inside
    assert supervised > 50 and (padding > 0) == (anchors == 40)


def test_context_ends_before_the_anchor() -> None:
    bias = context_bias(torch.tensor([[0, 2, 4]]), 4)
    assert (bias[0] == 0).tolist() == [[False] * 4, [True, True, False, False], [True] * 4]
    assert (bias[0, 0] == float("-inf")).all()


def test_prompts_per_domain_takes_the_first_of_every_folder(llama_world) -> None:
    few = ResponseSet(llama_world.train, 2)
    expected = [
        name for path in llama_world.train for name in read_table(path / "responses.parquet").prompt_id[:2]
    ]
    assert few.rows.prompt_id.tolist() == expected


def test_answers_without_an_anchor_are_an_error(llama_world, tmp_path) -> None:
    frame = read_table(llama_world.train[0] / "responses.parquet")
    write_table(
        tmp_path / "responses.parquet", frame.assign(response_ids=[ids[:1] for ids in frame.response_ids])
    )
    (tmp_path / SHARD).write_bytes((llama_world.train[0] / SHARD).read_bytes())
    with pytest.raises(DraftpoolError, match="no answer of at least two tokens"):
        ResponseSet([tmp_path], None)
    (tmp_path / SHARD).write_bytes(b"cut")
    with pytest.raises(DraftpoolError, match="damaged taps.*snakemake"):
        ResponseSet([tmp_path], None)


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0 and rates[55] == pytest.approx(1.0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False)) and 0 < rates[-1] < 0.002


# --- runs -----------------------------------------------------------------------------------------------


def _train(world, root: Path, name: str, **changes) -> Path:
    out = root / name
    cfg = training_cfg(20, domains=["tales", "sums"], **changes)
    train_drafter(cfg, world.target, world.train, None, root / "state" / name, out)
    return out


def _training(**changes) -> dict:
    return training_cfg(20)["training"] | changes


def _log(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "training.csv")


@pytest.fixture(scope="module")
def whole(llama_world, tmp_path_factory) -> Path:
    """An uninterrupted run of 20 steps."""
    return _train(llama_world, tmp_path_factory.mktemp("whole"), "run")


def _assert_same_run(one: Path, two: Path) -> None:
    weights, others = (load_file(path / "model.safetensors") for path in (one, two))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    pd.testing.assert_frame_equal(
        _log(one).drop(columns=TIMING), _log(two).drop(columns=TIMING), check_exact=True
    )
    names = ("initial_parameters", "data_order", "vocabulary_coverage", "sequences", "answer_tokens")
    first, second = (read_json(path / "provenance.json") for path in (one, two))
    assert {name: first[name] for name in names} == {name: second[name] for name in names}


def test_d32_compared_runs_differ_in_the_objective_only(llama_world, whole, tmp_path) -> None:
    other = _train(llama_world, tmp_path, "dflash", objective={"kind": "dflash", "reduction": "anchor_mean"})
    resolved = [yaml.safe_load((path / "resolved.yaml").read_text()) for path in (whole, other)]
    assert {key for key in resolved[0] if resolved[0][key] != resolved[1][key]} == {"objective"}
    provenance = [read_json(path / "provenance.json") for path in (whole, other)]
    for name in ("initial_parameters", "data_order"):
        assert provenance[0][name] == provenance[1][name]
    seeded = read_json(_train(llama_world, tmp_path, "seed", seed=1) / "provenance.json")
    assert seeded["initial_parameters"] != provenance[0]["initial_parameters"]
    assert seeded["data_order"] != provenance[0]["data_order"]
    first, second = _log(whole), _log(other)
    # The same model on the same data: the first step's confidences agree, the weights of its slots do not.
    columns = [name for name in first if name.startswith("confidence")]
    assert len(columns) == 3 and (first.loc[0, columns] == second.loc[0, columns]).all()
    assert first.weight_share_1[0] != second.weight_share_1[0]
    assert first.confidence_1[19] != second.confidence_1[19]


def _fail_at(monkeypatch, step: int) -> None:
    make = train.make_batch

    def interrupted(responses, at, *arguments):
        if at == step:
            monkeypatch.setattr(train, "make_batch", make)
            raise RuntimeError("out of memory")
        return make(responses, at, *arguments)

    monkeypatch.setattr(train, "make_batch", interrupted)


def _watch_steps(monkeypatch) -> list[int]:
    steps, make = [], train.make_batch
    monkeypatch.setattr(
        train, "make_batch", lambda data, at, *rest: (steps.append(at), make(data, at, *rest))[1]
    )
    return steps


def test_d33_a_resumed_run_is_bit_equal(llama_world, whole, tmp_path, monkeypatch) -> None:
    """After a sudden end; test_training_distributed.py sends signals to real processes."""
    _fail_at(monkeypatch, 7)
    with pytest.raises(RuntimeError):
        _train(llama_world, tmp_path, "run")
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "state" / "run" / "checkpoint.safetensors").exists()
    steps = _watch_steps(monkeypatch)
    _assert_same_run(_train(llama_world, tmp_path, "run"), whole)
    assert steps == list(range(5, 20))
    assert not (tmp_path / "state" / "run").exists()


@pytest.mark.parametrize("fate", ["half-written", "other configuration", "other code"])
def test_d33_a_checkpoint_of_something_else_is_ignored(
    fate, llama_world, whole, tmp_path, monkeypatch
) -> None:
    _fail_at(monkeypatch, 7)
    with monkeypatch.context() as patched:
        changes = {}
        if fate == "other configuration":
            changes = {"training": _training(lr=1e-3)}
        elif fate == "other code":
            patched.setattr(train, "code_digest", lambda *_: "0" * 16)
        with pytest.raises(RuntimeError, match="out of memory"):
            _train(llama_world, tmp_path, "run", **changes)
    checkpoint = tmp_path / "state" / "run" / "checkpoint.safetensors"
    if fate == "half-written":
        content = checkpoint.read_bytes()
        checkpoint.write_bytes(content[: len(content) // 2])
    steps = _watch_steps(monkeypatch)
    _assert_same_run(_train(llama_world, tmp_path, "run"), whole)
    assert steps == list(range(20))


def test_d33_checkpoints_restore_everything_or_nothing(tmp_path) -> None:
    def fresh():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def advance(model, optimiser, steps) -> None:
        for step in range(steps):
            optimiser.zero_grad()
            (model(torch.full((1, 3), float(step + 1))) ** 2).sum().backward()
            optimiser.step()

    path, log = tmp_path / "state" / "c.safetensors", [{"step": 0, "loss": 0.1 + 0.2}]
    model, optimiser = fresh()
    advance(model, optimiser, 3)
    save_checkpoint(path, "key", 3, model, optimiser, log, "order")
    copy, copied = fresh()
    assert load_checkpoint(path, "another key", copy, copied) is None
    assert load_checkpoint(tmp_path / "absent", "key", copy, copied) is None
    assert not copied.state and torch.equal(copy.weight, fresh()[0].weight)
    assert load_checkpoint(path, "key", copy, copied) == (3, log, "order")
    for one, two in ((model, optimiser), (copy, copied)):
        advance(one, two, 4)
    assert torch.equal(copy.weight, model.weight) and torch.equal(copy.bias, model.bias)


def test_a_second_copy_of_the_job_is_refused(llama_world, tmp_path) -> None:
    state = tmp_path / "state" / "run"
    state.mkdir(parents=True)
    with FileLock(state / "lock"), pytest.raises(DraftpoolError, match="another copy of this job is running"):
        _train(llama_world, tmp_path, "run")
    assert state.exists() and not (tmp_path / "run").exists()
    _train(llama_world, tmp_path, "run", training=_training(steps=1))


def test_the_loss_falls(llama_world) -> None:
    for path in llama_world.drafters[:2]:
        log = _log(path)
        assert log.step.tolist() == list(range(60))
        assert log.loss[-10:].mean() < 0.7 * log.loss[:10].mean()
        assert log.confidence_1[-10:].mean() > 2 * log.confidence_1[:5].mean()


def test_clipped_steps_are_logged(llama_world, whole, tmp_path) -> None:
    always = _log(_train(llama_world, tmp_path, "always", training=_training(clip=1e-3)))
    never = _log(_train(llama_world, tmp_path, "never", training=_training(clip=None)))
    assert always.clipped.all() and not never.clipped.any() and (never.grad_norm > 0).all()
    # The norm is that before clipping, so the first step's is the same.
    assert always.grad_norm[0] == never.grad_norm[0] and always.grad_norm[5] != never.grad_norm[5]
    middle = float(_log(whole).grad_norm.median())
    some = _log(_train(llama_world, tmp_path, "some", training=_training(clip=middle)))
    assert (some.clipped == (some.grad_norm > middle)).all() and some.clipped.nunique() == 2


def test_a_gradient_that_is_not_finite_is_one_clear_error(llama_world, tmp_path) -> None:
    with pytest.raises(DraftpoolError, match="gradient is not finite at step [1-9].*training.lr"):
        _train(llama_world, tmp_path, "run", training=_training(lr=1e25, warmup_ratio=0.0))
    assert not (tmp_path / "run").exists()


def test_provenance_tells_what_the_vocabulary_covers(llama_world) -> None:
    answers = [
        token
        for path in llama_world.train
        for ids in read_table(path / "responses.parquet").response_ids
        if len(ids) > 1
        for token in ids
    ]
    for path in llama_world.drafters:
        known = set(load_file(path / "model.safetensors")["vocabulary"].tolist())
        told = read_json(path / "provenance.json")
        assert told["vocabulary_coverage"] == pytest.approx(np.mean([token in known for token in answers]))
        assert told["answer_tokens"] == len(answers) and (told["vocabulary_coverage"] < 1) == (
            path.name == "small"
        )


def test_a_signal_while_stepping_is_noted_and_both_are_restored() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with StopRequests() as requests:
        assert not requests.noted
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        assert requests.noted
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_d33_a_signal_in_the_last_step_is_heard_too(llama_world, whole, tmp_path, monkeypatch) -> None:
    make = train.make_batch

    def told(responses, at, *arguments):
        if at == 19:
            os.kill(os.getpid(), signal.SIGTERM)
        return make(responses, at, *arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(train, "make_batch", told)
        _train(llama_world, tmp_path, "run")
    assert not (tmp_path / "run").exists()
    steps = _watch_steps(monkeypatch)
    _assert_same_run(_train(llama_world, tmp_path, "run"), whole)
    assert steps == []


def test_precision_is_what_was_asked_for(llama_world, tmp_path, monkeypatch) -> None:
    """Products in bfloat16 or not; weights and what the optimiser keeps stay float32."""
    runs = {}
    for precision in ("float32", "bfloat16"):
        folder = _train(llama_world, tmp_path, precision, training=_training(precision=precision, steps=3))
        assert read_json(folder / "provenance.json")["bfloat16"] == (precision == "bfloat16")
        runs[precision] = _log(folder)
        assert all(
            value.dtype in (torch.float32, torch.int64)
            for value in load_file(folder / "model.safetensors").values()
        )
    first = [runs[precision].loss[0] for precision in ("float32", "bfloat16")]
    assert first[0] != first[1] and first[0] == pytest.approx(first[1], rel=0.05)
    for native in (False, True):
        monkeypatch.setattr(train, "cpu_multiplies_bfloat16", lambda native=native: native)
        assert train.uses_bfloat16("auto", torch.device("cpu")) == native
        assert train.uses_bfloat16("auto", torch.device("cuda"))
