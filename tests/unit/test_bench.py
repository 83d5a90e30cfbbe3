"""The benchmarks' own arithmetic, and that their peers do the same work."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from tiny import load, training_cfg

from draftpool.training.batches import ResponseSet, make_batch
from draftpool.training.objectives.base import make_objective
from draftpool.training.train import batch_loss
from draftpool.training.trainees import new_trainee

BENCH = Path(__file__).resolve().parents[2] / "bench"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def bench_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in (
        "harness",
        "roofline",
        "plain_training",
        "beside_transformers",
        "bench_decode",
        "bench_replay",
    ):
        sys.modules.pop(name, None)


def test_the_replay_benchmark_plays_whole_answers():
    import bench_replay

    answers = bench_replay.synthetic(3)
    uniforms = bench_replay.EpisodeDraws([(0, 0, str(a)) for a in range(3)], bench_replay.ARMS + 1)
    for cfg, _ in bench_replay.LEARNERS.values():
        made = bench_replay.replay(
            bench_replay.make_selector(cfg, answers.arms), answers, np.arange(3), uniforms
        )
        assert (np.where(made.arms >= 0, made.committed, 0).sum(axis=0) == bench_replay.TOKENS).all()


def test_arms_take_turns_and_warm_up_is_dropped():
    import harness

    calls = []
    arms = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    times = harness.interleave(arms, 5, CPU)
    assert {len(values) for values in times.values()} == {5} and len(calls) == 2 * (5 + 1)
    assert calls[:4] in (["b", "a", "a", "b"], ["a", "b", "b", "a"])


def test_ratios_are_paired():
    import harness

    times = {"a": [1.0, 2.0, 30.0, 4.0], "b": [1.0, 1.0, 10.0, 4.0]}
    made = harness.ratio(times, "a", "b")
    assert made["median"] == pytest.approx(1.5) and made["n"] == 4
    assert harness.spread([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0, "n": 1}


def test_a_report_ends_with_one_json_line(tmp_path, capsys):
    import harness

    report = harness.Report("x", Namespace(out=tmp_path, device="cpu", dtype="float32"))
    report.row("speed", {"median": 2.0, "low": 1.0, "high": 3.0, "n": 4}, "x")
    report.finish()
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line) == json.loads((tmp_path / "x.json").read_text())
    assert json.loads(line)["rows"]["speed"]["unit"] == "x" and json.loads(line)["benchmark"] == "x"


def test_a_missing_study_says_what_to_run(monkeypatch, tmp_path, capsys):
    import harness

    from draftpool.errors import DraftpoolError

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    study = harness.Study([])
    with pytest.raises(DraftpoolError, match="make study"):
        assert study.target
    with pytest.raises(SystemExit) as ended:
        harness.run(lambda: study.target)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_roofline_is_drawn(tmp_path):
    import roofline

    names = [
        "block of 1",
        "block of 8",
        "draft, block of 4",
        "stacked evaluation of 6",
        "transformers, one token",
    ]
    rows = {name: {"median": 10.0 + place, "low": 9.0, "high": 16.0} for place, name in enumerate(names)}
    rows["read bandwidth"] = {"median": 20.0}
    rows["share of the bandwidth limit, one token (bar: at least 0.4)"] = {"median": 0.4}
    result = {"rows": rows, "bytes": {name: 1e8 * (1 + place) for place, name in enumerate(names)}}
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(result | {"dtype": "float32", "threads": 2, "device": "cpu"}))
    image = matplotlib.image.imread(roofline.draw(path))
    assert np.ptp(image) > 0.5 and (tmp_path / "roofline.pdf").exists()


def test_the_plain_training_loop_takes_the_same_step(llama_world):
    from plain_training import PlainDrafter, plain_step

    world, cfg = llama_world, training_cfg(model={"n_layers": 2, "block_size": 4, "draft_vocab": 60})
    data = ResponseSet(world.train, None)
    trainee = new_trainee(cfg | {"init": "target_layers"}, world.target, data, None, CPU)
    model = trainee.module
    columns = np.full(model.config.target_vocabulary, -1, dtype=np.int64)
    columns[model.vocabulary.numpy()] = np.arange(len(model.vocabulary))
    plain, objective = PlainDrafter(world.target, model), make_objective({"kind": "dpace"}, 4)
    batch = make_batch(data, 0, 0, 3, 6, 4, columns)
    ours = batch_loss(trainee, batch, objective, autocast=False)
    taps = plain.online_taps(torch.tensor([[5, 6, 7, 8]]))
    fast = load(world.target, model.config.taps)
    fresh = fast.forward(torch.tensor([[5, 6, 7, 8]]), fast.new_cache(4), "none").taps
    torch.testing.assert_close(taps, fresh, atol=1e-4, rtol=1e-4)
    before = plain.fuse.weight.clone()
    loss = plain_step(plain, batch.taps, batch, objective)
    assert loss == pytest.approx(float(ours.loss.detach()), rel=1e-4)
    ours.loss.backward()
    torch.nn.utils.clip_grad_norm_(list(model.parameters()), 10.0)  # as the plain loop does
    torch.testing.assert_close(plain.fuse.weight.grad, model.fuse.weight.grad, atol=1e-4, rtol=1e-3)
    assert not torch.equal(before, plain.fuse.weight)
