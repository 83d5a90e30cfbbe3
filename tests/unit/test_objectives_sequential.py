"""Objectives of sequential drafters against float64 loops; which objective trains which kind of drafter."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftpool import registry
from draftpool.config.stages import check_kinds
from draftpool.errors import DraftpoolError
from draftpool.registry import list_registered, load_registered
from draftpool.training.objectives.base import DECORATOR, PACKAGE, make_objective, objectives_for

SEQUENTIAL = ("eagle", "independent")
DISTILLED = ("forward_kl", "reverse_kl", "tvd")
NEW = ("cross_entropy", *DISTILLED)
DPACE = ("dpace", "dpace_cumulative", "dpace_continuation", "direct_surrogate")
BLOCK_ONLY = (*DPACE, "dflash", "head_dependent")
REDUCTIONS = ("anchor_mean", "weight_mean", "sequence_sum", "published")
seeds = st.integers(0, 2**31 - 1)


def make(kind: str, slots: int = 5, drafter: str = "eagle", **parameters):
    return make_objective({"kind": kind, **parameters}, slots + 1, drafter)


def random_rows(seed: int, rows: int = 6, columns: int = 9, mass: float | None = None, holes: bool = True):
    """log q and p, float32; with `holes` some p are 0, some q too where p is; rows of p add up to `mass`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 3
    p = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 3).exp()
    if holes:
        gone = torch.rand(rows, columns, generator=generator) < 0.3
        gone[:, 0] = False
        p[gone] = 0.0
        logits[gone & (torch.rand(rows, columns, generator=generator) < 0.5)] = -math.inf
    share = torch.rand(rows, 1, generator=generator, dtype=torch.float64) if mass is None else mass
    return logits.log_softmax(-1).float(), (p / p.sum(-1, keepdim=True) * share).float()


def naive_divergence(kind: str, log_q: list[float], p: list[float]) -> float:
    """One row from the formula; terms with nothing in front of the logarithm do not exist."""
    q = [math.exp(value) for value in log_q]
    if kind == "tvd":
        return 1 - sum(min(a, b) for a, b in zip(p, q, strict=True))
    total = sum(p)
    if total == 0:
        return 0.0
    p = [value / total for value in p]
    if kind == "forward_kl":
        return sum(a * (math.log(a) - lq) for a, lq in zip(p, log_q, strict=True) if a > 0)
    floor = 1.2e-38
    return sum(b * (lq - math.log(max(a, floor))) for a, b, lq in zip(p, q, log_q, strict=True) if b > 0)


def random_slots(seed: int, slots: int = 5, anchors: int = 7):
    """log q of the labels, divergence, mask, sequence of each anchor (3); masked slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    log_q = -torch.rand(anchors, slots, generator=generator) * 6
    divergence = torch.rand(anchors, slots, generator=generator) * 4
    mask = torch.rand(anchors, slots, generator=generator) < 0.7
    mask[0] = False
    index = torch.randint(0, 3, (anchors,), generator=generator)
    return log_q.masked_fill(~mask, math.nan), divergence.masked_fill(~mask, math.nan), mask, index


# -- divergences -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DISTILLED)
@settings(deadline=None, max_examples=40)
@given(seed=seeds, reduced=st.booleans())
def test_divergence_equals_the_naive_loops(kind, seed, reduced):
    log_q, p = random_rows(seed, mass=None if reduced else 1.0)
    found = make(kind).divergence(log_q, p)
    expected = [naive_divergence(kind, a, b) for a, b in zip(log_q.tolist(), p.tolist(), strict=True)]
    assert found.dtype == torch.float32 and found.shape == (6,)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@settings(deadline=None, max_examples=20)
@given(seed=seeds)
def test_kl_equals_torch_distributions(kind, seed):
    log_q, p = random_rows(seed, mass=1.0, holes=False)
    target = torch.distributions.Categorical(probs=p.double())
    drafter = torch.distributions.Categorical(logits=log_q.double())
    pair = (target, drafter) if kind == "forward_kl" else (drafter, target)
    expected = torch.distributions.kl_divergence(*pair).float()
    torch.testing.assert_close(make(kind).divergence(log_q, p), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(seed=seeds)
def test_tvd_is_half_the_l1_distance_of_whole_vocabularies(seed):
    log_q, p = random_rows(seed, mass=1.0)
    expected = (p - log_q.exp()).abs().sum(-1) / 2
    torch.testing.assert_close(make("tvd").divergence(log_q, p), expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=20)
@given(seed=seeds, reduced=st.booleans())
def test_tvd_is_the_probability_of_a_rejection(seed, reduced):
    """A token x drawn from q is accepted with probability min(1, p(x) / q(x)), p being the target's own."""
    log_q, p = random_rows(seed, mass=None if reduced else 1.0)
    for row_q, row_p, found in zip(log_q, p, make("tvd").divergence(log_q, p), strict=True):
        pairs = zip(row_q.double().exp().tolist(), row_p.tolist(), strict=True)
        accepted = sum(q * min(1.0, a / q) for q, a in pairs if q > 0)
        assert found.item() == pytest.approx(1 - accepted, abs=1e-6)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_kl_looks_at_p_renormalised_over_the_draft_vocabulary(kind):
    log_q, p = random_rows(4, mass=1.0)
    objective = make(kind)
    torch.testing.assert_close(objective.divergence(log_q, p * 0.25), objective.divergence(log_q, p))


def test_known_answers():
    _, p = random_rows(1, mass=1.0)
    assert make("forward_kl").divergence(p.log(), p).abs().max() < 1e-6
    assert make("reverse_kl").divergence(p.log(), p).abs().max() < 1e-6
    assert make("tvd").divergence(p.log(), p).abs().max() < 1e-6
    assert make("forward_kl").divergence(p.log(), p * 0.5).abs().max() < 1e-6
    assert make("tvd").divergence(p.log(), p * 0.5).tolist() == pytest.approx([0.5] * 6)
    half, left = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.5, 0.25, 0.25]])
    right = torch.tensor([[0.0, 0.0, 1.0]])
    assert make("tvd").divergence(half.log(), right).item() == 1.0
    assert make("tvd").divergence(half.log(), left).item() == 0.25
    assert make("forward_kl").divergence(left.log(), half).item() == pytest.approx(0.5 * math.log(2))
    assert make("reverse_kl").divergence(half.log(), left).item() == pytest.approx(0.5 * math.log(2))
    assert make("forward_kl").divergence(half.log(), right).item() == math.inf
    assert make("reverse_kl").divergence(half.log(), right).item() == pytest.approx(
        87.3 - math.log(2), abs=0.1
    )


@pytest.mark.parametrize("kind", DISTILLED)
@pytest.mark.parametrize("reduced", [False, True])
def test_gradcheck(kind, reduced):
    """Finite differences through a log-softmax in float64, with columns that the target never says."""
    _, p = random_rows(8, mass=None if reduced else 1.0)
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(p.shape, generator=generator, dtype=torch.float64, requires_grad=True)
    objective = make(kind)
    assert (p == 0).any()
    assert torch.autograd.gradcheck(
        lambda x: objective.divergence(x.log_softmax(-1), p.double()), (logits,), eps=1e-6, atol=1e-5
    )


def test_forward_kl_has_the_gradient_of_eagle_3():
    """Cross-entropy against softmax over the kept logits: q - p renormalised, at the logits."""
    _, p = random_rows(2)
    logits = torch.randn(p.shape, generator=torch.Generator().manual_seed(3), requires_grad=True)
    make("forward_kl").divergence(logits.log_softmax(-1), p).sum().backward()
    expected = logits.detach().softmax(-1) - p / p.sum(-1, keepdim=True)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", DISTILLED)
def test_extremes_give_no_nan(kind):
    """Zeros on either and both sides, underflow, a row whose mass lies outside the draft vocabulary."""
    never = -math.inf
    logits = torch.tensor(
        [
            [0.0, 1.0, never, never],
            [0.0, never, never, never],
            [0.0, -200.0, -1e4, -1e30],
            [0.0, 1.0, 2.0, 3.0],
            [0.0, 1.0, 2.0, never],
            [0.0, 1.0, 2.0, 3.0],
        ],
        requires_grad=True,
    )
    p = torch.tensor(
        [
            [0.5, 0.5, 0.0, 0.0],
            [1.0, 0.0, 0.0, 0.0],
            [0.1, 0.2, 0.3, 0.4],
            [1.0, 0.0, 0.0, 1e-42],
            [0.0, 0.0, 0.0, 0.0],
            [1e-30, 0.0, 3e-30, 0.0],
        ]
    )
    values = make(kind).divergence(logits.log_softmax(-1), p)
    assert torch.isfinite(values).all()
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert torch.isfinite(gradient).all()
    assert values[4].item() == (1.0 if kind == "tvd" else 0.0)
    assert (gradient[4] == 0).all()
    faint = make(kind).divergence(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1e-42, 0.0]]))
    assert faint.item() == values[4].item()
    unbounded = make(kind).divergence(torch.tensor([[0.0, never]]), torch.tensor([[0.5, 0.5]]))
    assert unbounded.item() == (
        math.inf if kind == "forward_kl" else pytest.approx(0.5 if kind == "tvd" else 0.69, abs=0.01)
    )


# -- loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(deadline=None, max_examples=15)
@given(seed=seeds, slots=st.integers(1, 7), decay=st.floats(0.05, 1.0))
def test_loss_equals_the_naive_loops(kind, reduction, seed, slots, decay):
    log_q, divergence, mask, index = random_slots(seed, slots)
    objective = make(kind, slots, decay=decay, reduction=reduction)
    report = objective.loss(log_q, mask, index, 3, divergence if kind in DISTILLED else None)
    cost = divergence if kind in DISTILLED else -log_q
    terms, mass, rows = [0.0] * 7, 0.0, [[] for _ in range(3)]
    for a in range(7):
        for k in range(slots):
            if mask[a, k]:
                terms[a] += decay**k * cost[a, k].item()
                mass += decay**k
        if mask[a].any():
            rows[index[a].item()].append(terms[a])
    means = [sum(found) / len(found) for found in rows if found]
    expected = {
        "anchor_mean": sum(means) / max(1, len(means)),
        "sequence_sum": sum(terms) / 3,
        "weight_mean": sum(terms) / mass if mass else 0.0,
    }
    expected["published"] = expected["weight_mean"]
    assert report.loss.item() == pytest.approx(expected[reduction], rel=2e-5, abs=1e-6)
    on = mask.any(dim=0)
    share = torch.tensor([decay**k for k in range(slots)]) * on
    torch.testing.assert_close(
        report.weight_share, share / share.sum().clamp(min=1e-30), rtol=1e-4, atol=1e-6
    )
    confidence = log_q.exp().nan_to_num(0.0).sum(dim=0) / mask.sum(dim=0).clamp(min=1)
    torch.testing.assert_close(report.confidence, confidence, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", DISTILLED)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -3.0])
def test_masked_slots_do_not_matter(kind, junk):
    log_q, divergence, mask, index = random_slots(5)
    objective = make(kind, decay=0.8)
    expected = objective.loss(log_q, mask, index, 3, divergence.nan_to_num(0.0))
    divergence = divergence.masked_fill(~mask, junk).requires_grad_()
    report = objective.loss(log_q, mask, index, 3, divergence)
    report.loss.backward()
    assert report.loss.item() == expected.loss.item()
    assert torch.isfinite(divergence.grad).all() and (divergence.grad[~mask] == 0).all()
    assert (divergence.grad[mask] > 0).all()
    nothing = objective.loss(log_q, mask & False, index, 3, divergence)
    assert nothing.loss.item() == 0.0


@pytest.mark.parametrize("kind", DISTILLED)
def test_gradient_reaches_the_drafter_through_the_divergence_alone(kind):
    log_q, p = random_rows(6, rows=10, holes=False)
    log_q.requires_grad_()
    objective = make(kind, decay=0.5, reduction="sequence_sum")
    divergence = objective.divergence(log_q, p).view(2, 5)
    label = log_q[:, 0].reshape(2, 5)
    mask = torch.ones(2, 5, dtype=torch.bool)
    (found,) = torch.autograd.grad(
        objective.loss(label, mask, torch.tensor([0, 1]), 2, divergence).loss, log_q, retain_graph=True
    )
    weights = torch.tensor([0.5**k for k in range(5)]).expand(2, 5) / 2
    (expected,) = torch.autograd.grad((weights * divergence).sum(), log_q)
    torch.testing.assert_close(found, expected)


def test_bfloat16_is_reduced_in_float32():
    log_q, divergence, mask, index = random_slots(3)
    report = make("tvd").loss(log_q.bfloat16(), mask, index, 3, divergence.bfloat16())
    assert report.loss.dtype == report.confidence.dtype == torch.float32


@pytest.mark.parametrize("kind", DISTILLED)
def test_a_missing_divergence_is_told(kind):
    log_q, divergence, mask, index = random_slots(0)
    with pytest.raises(DraftpoolError, match=f"objective {kind}: it reads the target.*-> pass loss"):
        make(kind).loss(log_q, mask, index, 3)
    with pytest.raises(DraftpoolError, match=r"divergence \(7, 4\), mask \(7, 5\).*one value per anchor"):
        make(kind).loss(log_q, mask, index, 3, divergence[:, 1:])


@pytest.mark.parametrize("kind", ["cross_entropy", "uniform", "dpace"])
def test_an_unwanted_divergence_is_told(kind):
    log_q, divergence, mask, index = random_slots(0)
    objective = make(kind, drafter="block" if kind == "dpace" else "eagle")
    with pytest.raises(DraftpoolError, match=f"objective {kind}: a divergence was given.*-> leave"):
        objective.loss(log_q, mask, index, 3, divergence)
    with pytest.raises(NotImplementedError, match="does not read the target"):
        objective.divergence(log_q, log_q)


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize("decay", [0.0, 1.5, -0.2, math.nan])
def test_decay_is_checked(kind, decay):
    with pytest.raises(DraftpoolError, match="parameter 'decay'"):
        make(kind, decay=decay)


def test_cross_entropy_without_decay_is_uniform_and_with_it_dflash():
    log_q, _, mask, index = random_slots(2)
    plain = make("cross_entropy").loss(log_q, mask, index, 3).loss
    assert plain.item() == make("uniform").loss(log_q, mask, index, 3).loss.item()
    decayed = make("cross_entropy", decay=math.exp(-1 / 4)).loss(log_q, mask, index, 3).loss
    block = make("dflash", drafter="block", gamma=4.0).loss(log_q, mask, index, 3).loss
    assert decayed.item() == pytest.approx(block.item(), rel=1e-6)


# -- kinds of drafter --------------------------------------------------------------------------------------


def test_objectives_of_each_kind():
    assert objectives_for("block") == sorted([*BLOCK_ONLY, "uniform", *DISTILLED])
    for kind in SEQUENTIAL:
        assert objectives_for(kind) == sorted([*NEW, "uniform"])
    assert objectives_for("ngram") == []


@pytest.mark.parametrize("drafter", SEQUENTIAL)
@pytest.mark.parametrize("kind", BLOCK_ONLY)
def test_block_objectives_are_refused_for_sequential_drafters(kind, drafter):
    with pytest.raises(DraftpoolError) as caught:
        make(kind, drafter=drafter)
    message = str(caught.value)
    assert message.startswith(f"objective {kind}: not for drafters of kind '{drafter}': ")
    assert message.endswith("-> use one of: cross_entropy, forward_kl, reverse_kl, tvd, uniform")
    assert "\n" not in message
    if kind in DPACE:
        assert "derivative of the expected accepted length of a block" in message
        assert "drafted at once from the same prefix (parallel drafting" in message
        assert "each step's cross-entropy already stands for itself" in message
    else:
        assert "`cross_entropy` with" in message


def test_cross_entropy_is_refused_for_blocks():
    with pytest.raises(
        DraftpoolError, match="not for drafters of kind 'block'.*`uniform`.*use one of: dflash, "
    ):
        make("cross_entropy", drafter="block")


def test_a_kind_that_is_not_trained_is_told():
    with pytest.raises(DraftpoolError, match="kind 'ngram' -> no objective trains kind 'ngram'"):
        make("uniform", drafter="ngram")


def test_every_objective_that_refuses_says_why_and_those_that_read_the_target_can():
    for name in list_registered(PACKAGE, DECORATOR):
        cls = load_registered(PACKAGE, DECORATOR, name)
        assert cls.refusal or cls.kinds == {"block", *SEQUENTIAL}
        assert cls.reads_target == (name in DISTILLED)


def test_a_study_is_refused_before_any_job():
    def run(kind: str, objective: str | None):
        dump = SimpleNamespace(model_dump=lambda: {"kind": objective, "reduction": "published"})
        return SimpleNamespace(
            recipe=SimpleNamespace(trained=objective is not None, kind=kind, draft_tokens=3, objective=dump)
        )

    study = SimpleNamespace(replay=None, selectors={}, pool=[])
    runs = {"lookup": run("ngram", None), "small": run("independent", "tvd")}
    check_kinds(SimpleNamespace(runs=runs, study=study))
    with pytest.raises(
        DraftpoolError, match="drafter `head`: objective dpace: not for drafters of kind 'eagle'"
    ):
        check_kinds(SimpleNamespace(runs=runs | {"head": run("eagle", "dpace")}, study=study))


def test_refusing_needs_no_torch():
    code = (
        "import sys\n"
        "from draftpool.training.objectives.base import make_objective\n"
        "try:\n    make_objective({'kind': 'dpace'}, 4, 'eagle')\n"
        "except Exception as error:\n    assert 'use one of: cross_entropy' in str(error), error\n"
        "assert 'torch' not in sys.modules"
    )
    source = registry.__file__.rsplit("/draftpool/", 1)[0]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})


def test_the_table_of_the_documentation_is_true():
    page = (Path(__file__).parents[2] / "docs/add-an-objective.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ((?:block|eagle|independent)[^|]*) \|", page, re.MULTILINE)
    told = {name: frozenset(kinds.split(", ")) for name, kinds in rows}
    names = list_registered(PACKAGE, DECORATOR)
    assert told == {name: load_registered(PACKAGE, DECORATOR, name).kinds for name in names}
