"""A step cut into parts: the parts hold what the whole holds, and their gradients add up to its gradient."""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import pytest
import torch
from tiny import VOCABULARY
from training_runs import MODELS, alone, assert_close, cfg_of

from draftpool.registry import list_registered, load_registered
from draftpool.targets.tail import load_tail
from draftpool.training.batches import ResponseSet, make_batch, parts_of, step_rows
from draftpool.training.gradients import FlatGradients
from draftpool.training.objectives.base import DECORATOR, PACKAGE, LossSums, make_objective
from draftpool.training.train import batch_loss, batch_sums
from draftpool.training.trainees import new_trainee

CPU = torch.device("cpu")

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
def test_gradients_of_the_parts_add_up_to_that_of_the_whole(kind, objective, llama_world) -> None:
    """A step of 7 sequences, one of which has nothing supervised, in one piece and in 2 x 1, 1 x 3, 3 x 2 and 2 x 5."""
    data, cfg = ResponseSet(llama_world.train, None), cfg_of(kind, objective)
    trainee = new_trainee(cfg, llama_world.target, data, None, CPU)
    made = make_objective(objective, trainee.slots + 1, kind)
    tail = load_tail(llama_world.target, cfg["taps"], CPU) if made.reads_target else None
    columns = np.full(VOCABULARY, -1)
    columns[trainee.vocabulary.numpy()] = np.arange(len(trainee.vocabulary))
    # Nothing of the step's third answer can be proposed, so that its part may have no supervised slot at all.
    barred = make_batch(data, 0, 0, 7, 6, trainee.slots + 1, columns, range(2, 3))
    columns[barred.tokens[0].numpy()] = -1
    widths = data.lengths(step_rows(data, 0, 0, 7))
    gradients = FlatGradients(list(trainee.module.parameters()))

    def taken(processes: int, accumulate: int):
        gradients.clear()
        sums, lengths = [], []
        for process in range(processes):
            for part in parts_of(widths, processes, accumulate, process):
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
    generator = np.random.default_rng(0)
    for n, processes, accumulate in ((7, 1, 1), (7, 2, 1), (7, 2, 2), (5, 3, 2), (64, 8, 4), (2, 3, 2)):
        lengths = generator.integers(5, 200, size=n).tolist()
        shares = [parts_of(lengths, processes, accumulate, process) for process in range(processes)]
        assert sorted(place for share in shares for part in share for place in part) == list(range(n))
        sizes = [sum(map(len, share)) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        for share in shares:
            assert len(share) == accumulate and max(map(len, share)) - min(map(len, share)) <= 1
            # Micro-batches rise in length, and each is in the step's order.
            filled = [part for part in share if part]
            for shorter, longer in itertools.pairwise(filled):
                assert max(lengths[place] for place in shorter) <= min(lengths[place] for place in longer)
            assert all(part == sorted(part) for part in share)
    assert parts_of([9, 3, 5], 1, 1, 0) == [[0, 1, 2]]
    # Each process has a short and a long one.
    assert parts_of([1, 100, 2, 99], 2, 1, 0) == [[0, 3]]


def test_a_part_of_a_batch_holds_what_the_whole_batch_holds(llama_world) -> None:
    data, columns = ResponseSet(llama_world.train, None), np.arange(VOCABULARY)
    for step in range(3):
        whole = make_batch(data, step, 0, 5, 6, 4, columns)
        for part in ([0, 1], [2, 3, 4], [4], [0, 3]):
            cut = make_batch(data, step, 0, 5, 6, 4, columns, part)
            assert cut.order_hash == whole.order_hash and len(cut.taps) == len(part)
            length = cut.taps.shape[1]
            assert torch.equal(cut.taps, whole.taps[part, :length])
            assert torch.equal(cut.tokens, whole.tokens[part, : length + 1])
            assert torch.equal(cut.mask, whole.mask[part])
            assert torch.equal(cut.labels, whole.labels[part])
            assert torch.equal(cut.anchors, whole.anchors[part])


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
def test_micro_batches_take_the_steps_of_a_whole_batch(kind, llama_world, tmp_path) -> None:
    cfg = cfg_of(kind, {"kind": "forward_kl", "reduction": "weight_mean"}, batch_sequences=7, lr=1e-4)
    whole = alone(llama_world, tmp_path, cfg)
    for accumulate in (3, 7):
        assert_close(whole, alone(llama_world, tmp_path, cfg, accumulate, f"cut-{accumulate}"))
