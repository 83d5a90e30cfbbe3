"""Training objectives against plain Python loops, and the identities that the formulas must obey."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftpool.errors import DraftpoolError
from draftpool.training.objectives.base import make_objective

CONFIGS = [
    {"kind": "dflash"},
    {"kind": "dflash", "gamma": 1.5},
    {"kind": "uniform"},
    {"kind": "head_dependent"},
    {"kind": "head_dependent", "decay": 0.5},
    {"kind": "dpace"},
    {"kind": "dpace", "alpha": 0.0},
    {"kind": "dpace", "alpha": 1.0},
    {"kind": "dpace_cumulative", "alpha": 0.3},
    {"kind": "dpace_continuation", "alpha": 0.7},
    {"kind": "direct_surrogate"},
]
CONFIDENCE_KINDS = ("dpace", "dpace_cumulative", "dpace_continuation", "direct_surrogate")
CASES = [
    {**cfg, "reduction": reduction}
    for cfg in CONFIGS
    for reduction in ("anchor_mean", "weight_mean", "sequence_sum", "published")
    if not (reduction == "weight_mean" and cfg["kind"] in CONFIDENCE_KINDS)
]
seeds = st.integers(0, 2**31 - 1)


def label(cfg: dict) -> str:
    """Test id of a configuration."""
    return "-".join(str(value) for value in cfg.values())


def random_batch(seed: int, sequences: int = 3, anchors: int = 7, slots: int = 5):
    """log q, mask (some anchors entirely masked), the sequence of each anchor; masked slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    log_q = -torch.rand(anchors, slots, generator=generator) * 6
    mask = torch.rand(anchors, slots, generator=generator) < 0.7
    mask[torch.rand(anchors, generator=generator) < 0.2] = False
    index = torch.randint(0, sequences, (anchors,), generator=generator)
    return log_q.masked_fill(~mask, float("nan")), mask, index


def naive_weights(cfg: dict, log_q: list[float], mask: list[bool], block: int) -> list[float]:
    """Weights of one anchor, written from the formulas; only supervised slots exist in products and sums."""
    kind = cfg["kind"]
    slots = [j for j in range(len(mask)) if mask[j]]
    weights = [0.0] * len(mask)
    alpha = cfg.get("alpha", 0.0 if kind == "direct_surrogate" else 0.5)
    smooth = {j: (1 - alpha) * math.exp(log_q[j]) + alpha for j in slots}
    for j in slots:
        prefix = math.prod(smooth[i] for i in slots if i <= j)
        follow = sum(math.prod(smooth[i] for i in slots if j < i <= m) for m in slots if m >= j)
        weights[j] = {
            "dflash": math.exp(-j / cfg.get("gamma", {16: 7, 10: 5, 8: 4}.get(block, block / 2))),
            "uniform": 1.0,
            "head_dependent": cfg.get("decay", 0.8) ** (j + 1),
            "dpace": prefix * follow,
            "dpace_cumulative": prefix,
            "dpace_continuation": follow,
            "direct_surrogate": prefix * follow,
        }[kind]
    return weights


def naive_loss(cfg: dict, log_q, mask, index, n_sequences: int, reduction: str) -> float:
    """Loss of a batch by loops over sequences, anchors and slots."""
    log_q, mask, index = log_q.tolist(), mask.tolist(), index.tolist()
    block = len(mask[0]) + 1
    terms, mass = [], 0.0
    for row, supervised in zip(log_q, mask, strict=True):
        weights = naive_weights(cfg, row, supervised, block)
        mass += sum(weights)
        if cfg["kind"] == "direct_surrogate":
            slots = [j for j in range(block - 1) if supervised[j]]
            terms.append(-sum(math.exp(sum(row[i] for i in slots if i <= m)) for m in slots))
        else:
            terms.append(-sum(w * lq for w, lq, on in zip(weights, row, supervised, strict=True) if on))
    if reduction == "weight_mean":
        return sum(terms) / mass if mass else 0.0
    if reduction == "sequence_sum":
        return sum(terms) / n_sequences
    means = []
    for sequence in range(n_sequences):
        rows = [i for i in range(len(terms)) if index[i] == sequence and any(mask[i])]
        if rows:
            means.append(sum(terms[i] for i in rows) / len(rows))
    return sum(means) / len(means) if means else 0.0


@pytest.mark.parametrize("cfg", CASES, ids=label)
@settings(deadline=None, max_examples=20)
@given(seed=seeds, slots=st.integers(1, 9))
def test_d29_loss_equals_the_naive_loops(cfg, seed, slots):
    log_q, mask, index = random_batch(seed, slots=slots)
    report = make_objective(cfg, slots + 1).loss(log_q, mask, index, 3)
    named = cfg["reduction"]
    if named == "published":
        named = "sequence_sum" if cfg["kind"] in CONFIDENCE_KINDS else "weight_mean"
    expected = naive_loss(cfg, log_q, mask, index, 3, named)
    assert report.loss.item() == pytest.approx(expected, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("cfg", CONFIGS, ids=label)
@settings(deadline=None, max_examples=20)
@given(seed=seeds)
def test_report_equals_the_naive_means(cfg, seed):
    log_q, mask, index = random_batch(seed)
    report = make_objective(cfg, 6).loss(log_q, mask, index, 3)
    rows = [naive_weights(cfg, q, m, 6) for q, m in zip(log_q.tolist(), mask.tolist(), strict=True)]
    means, confidence = [], []
    for k in range(5):
        on = [a for a in range(7) if mask[a, k]]
        means.append(sum(rows[a][k] for a in on) / len(on) if on else 0.0)
        confidence.append(sum(math.exp(log_q[a, k]) for a in on) / len(on) if on else 0.0)
    share = [value / sum(means) if sum(means) else 0.0 for value in means]
    assert report.weight_share.tolist() == pytest.approx(share, rel=1e-4, abs=1e-6)
    assert report.confidence.tolist() == pytest.approx(confidence, rel=1e-5, abs=1e-7)
    assert not report.weight_share.requires_grad and not report.confidence.requires_grad


@pytest.mark.parametrize("cfg", CONFIGS, ids=label)
@settings(deadline=None, max_examples=15)
@given(seed=seeds)
def test_d29_repeating_the_batch_or_the_anchors_changes_nothing(cfg, seed):
    log_q, mask, index = random_batch(seed)
    objective = make_objective({**cfg, "reduction": "anchor_mean"}, 6)
    once = objective.loss(log_q, mask, index, 3).loss.item()
    twice_q, twice_mask = torch.cat([log_q, log_q]), torch.cat([mask, mask])
    batch = objective.loss(twice_q, twice_mask, torch.cat([index, index + 3]), 6).loss.item()
    anchors = objective.loss(twice_q, twice_mask, torch.cat([index, index]), 3).loss.item()
    assert batch == pytest.approx(once, rel=1e-5, abs=1e-7)
    assert anchors == pytest.approx(once, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("reduction", ["anchor_mean", "sequence_sum", "published"])
@pytest.mark.parametrize("cfg", [cfg for cfg in CONFIGS if cfg["kind"] != "direct_surrogate"], ids=label)
@settings(deadline=None, max_examples=15)
@given(seed=seeds)
def test_d30_gradient_is_that_of_constant_weights(cfg, reduction, seed):
    log_q, mask, index = random_batch(seed)
    objective = make_objective({**cfg, "reduction": reduction}, 6)
    log_q.requires_grad_()
    (gradient,) = torch.autograd.grad(objective.loss(log_q, mask, index, 3).loss, log_q)
    weights = [naive_weights(cfg, q, m, 6) for q, m in zip(log_q.tolist(), mask.tolist(), strict=True)]
    expected = -torch.tensor(weights)
    if reduction == "anchor_mean":
        valid = [sum(1 for a in range(7) if index[a] == s and mask[a].any()) for s in range(3)]
        sequences = max(1, sum(1 for count in valid if count))
        expected = expected / torch.tensor([max(1, valid[s]) * sequences for s in index.tolist()])[:, None]
    elif reduction == "sequence_sum" or cfg["kind"] in CONFIDENCE_KINDS:
        expected = expected / 3
    else:
        expected = expected / max(1e-30, sum(map(sum, weights)))
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["dpace", "dpace_cumulative"])
@settings(deadline=None, max_examples=60)
@given(seed=seeds, alpha=st.floats(0, 1))
def test_d30_weights_do_not_increase_along_the_block(kind, seed, alpha):
    log_q, mask, _ = random_batch(seed, slots=9)
    weights = make_objective({"kind": kind, "alpha": alpha}, 10).weights(log_q.nan_to_num(0.0), mask)
    for row, supervised in zip(weights, mask, strict=True):
        kept = row[supervised]
        assert (kept[1:] <= kept[:-1] * (1 + 1e-6)).all()


def test_continuation_weights_may_increase():
    """A hopeless slot in front of sure ones: what follows it is worth more than what leads to it."""
    log_q = torch.tensor([[0.9, 0.01, 0.9, 0.9]]).log()
    objective = make_objective({"kind": "dpace_continuation", "alpha": 0.0}, 5)
    weights = objective.weights(log_q, torch.ones(1, 4, dtype=torch.bool))[0]
    assert weights[1] > weights[0]
    assert weights[-1] == 1.0


@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_weight_is_the_derivative_of_the_surrogate(seed):
    """dS / dlog q_j at alpha = 0, S = sum_m P_m: direct_surrogate's gradient; sum_j w_j = sum_m m P_m."""
    log_q, mask, index = random_batch(seed)
    log_q.requires_grad_()
    surrogate = make_objective({"kind": "direct_surrogate", "reduction": "sequence_sum"}, 6)
    (gradient,) = torch.autograd.grad(surrogate.loss(log_q, mask, index, 3).loss, log_q)
    constant = log_q.detach().nan_to_num(0.0)
    weights = make_objective({"kind": "dpace", "alpha": 0.0}, 6).weights(constant, mask) * mask
    torch.testing.assert_close(-3 * gradient, weights, rtol=1e-5, atol=1e-7)
    prefix = make_objective({"kind": "dpace_cumulative", "alpha": 0.0}, 6).weights(constant, mask) * mask
    place = mask.cumsum(dim=1)
    torch.testing.assert_close(weights.sum(dim=1), (place * prefix).sum(dim=1), rtol=1e-5, atol=1e-7)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, alpha=st.floats(0, 1))
def test_dpace_is_cumulative_times_continuation(seed, alpha):
    log_q, mask, _ = random_batch(seed)
    log_q = log_q.nan_to_num(0.0)
    parts = {
        kind: make_objective({"kind": kind, "alpha": alpha}, 6).weights(log_q, mask) * mask
        for kind in ("dpace", "dpace_cumulative", "dpace_continuation")
    }
    product = parts["dpace_cumulative"] * parts["dpace_continuation"]
    torch.testing.assert_close(parts["dpace"], product, rtol=1e-5, atol=1e-7)


@settings(deadline=None, max_examples=40)
@given(rates=st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_expected_length_is_one_plus_the_surrogate(rates):
    """sum_k k (1 - a_k) prod_{j<k} a_j with a_{K+1} = 0 equals 1 + sum_m P_m."""
    expected, survive = 0.0, 1.0
    for k, rate in enumerate([*rates, 0.0], start=1):
        expected += k * (1 - rate) * survive
        survive *= rate
    log_q = torch.tensor([rates]).clamp(min=1e-30).log()
    mask = torch.ones_like(log_q, dtype=torch.bool)
    objective = make_objective({"kind": "direct_surrogate", "reduction": "sequence_sum"}, len(rates) + 1)
    surrogate = -objective.loss(log_q, mask, torch.zeros(1, dtype=torch.int64), 1).loss.item()
    assert 1 + surrogate == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("cfg", "q", "shares", "total"),
    [
        ({"kind": "dpace", "alpha": 0.5}, 1e-20, {1: 0.5}, 2.0),
        ({"kind": "dpace", "alpha": 0.5}, 0.2, {1: 0.40, 2: 0.24, 3: 0.14}, 3.7),
        ({"kind": "dpace", "alpha": 0.5}, 1.0, {1: 15 / 120, 15: 1 / 120}, 120.0),
        ({"kind": "dpace", "alpha": 0.9}, 0.2, {1: 0.15, 15: 0.005}, None),
        ({"kind": "dpace", "alpha": 0.0}, 0.2, {1: 0.80}, None),
        ({"kind": "dflash"}, 0.2, {1: 0.1508, 15: 0.0204}, None),
    ],
    ids=str,
)
def test_published_magnitudes_at_block_16(cfg, q, shares, total):
    log_q = torch.full((4, 15), q).log()
    mask = torch.ones(4, 15, dtype=torch.bool)
    objective = make_objective(cfg, 16)
    share = objective.loss(log_q, mask, torch.zeros(4, dtype=torch.int64), 1).weight_share
    for slot, expected in shares.items():
        assert share[slot - 1].item() == pytest.approx(expected, abs=0.01 if expected > 0.02 else 0.001)
    if total is not None:
        assert objective.weights(log_q, mask)[0].sum().item() == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4), (4, 2), (6, 3)])
def test_dflash_gamma_follows_the_block(block, gamma):
    log_q = torch.zeros(1, block - 1)
    weights = make_objective({"kind": "dflash"}, block).weights(log_q, log_q == 0)[0]
    assert weights.tolist() == pytest.approx([math.exp(-k / gamma) for k in range(block - 1)], rel=1e-6)


@pytest.mark.parametrize("cfg", CASES, ids=label)
def test_masked_anchors_contribute_nothing(cfg):
    log_q, mask, index = random_batch(11)
    mask[0] = True
    log_q[0] = -1.0
    objective = make_objective(cfg, 6)
    report = objective.loss(log_q, mask, index, 3)
    more_q = torch.cat([log_q, torch.full((2, 5), float("nan"))])
    more_mask = torch.cat([mask, torch.zeros(2, 5, dtype=torch.bool)])
    padded = objective.loss(more_q, more_mask, torch.cat([index, torch.tensor([0, 1])]), 3)
    torch.testing.assert_close(padded.loss, report.loss)
    torch.testing.assert_close(padded.weight_share, report.weight_share)
    torch.testing.assert_close(padded.confidence, report.confidence)
    log_q = more_q[-2:].clone().requires_grad_()
    nothing = objective.loss(log_q, more_mask[-2:], torch.tensor([0, 1]), 3)
    nothing.loss.backward()
    assert nothing.loss.item() == 0.0
    assert (log_q.grad == 0).all()
    assert torch.isfinite(nothing.weight_share).all() and torch.isfinite(nothing.confidence).all()


@pytest.mark.parametrize("cfg", CONFIGS, ids=label)
@pytest.mark.parametrize("low", [-60.0, -200.0, -1e4])
def test_gradient_is_finite_when_q_vanishes(cfg, low):
    log_q = torch.tensor([[-0.1, low, -0.2, low, low], [low] * 5], requires_grad=True)
    report = make_objective(cfg, 6).loss(log_q, torch.ones(2, 5, dtype=torch.bool), torch.tensor([0, 1]), 2)
    report.loss.backward()
    assert torch.isfinite(report.loss) and torch.isfinite(log_q.grad).all()
    assert torch.isfinite(report.weight_share).all()


@pytest.mark.parametrize("cfg", CONFIGS, ids=label)
def test_bfloat16_is_computed_in_float32(cfg):
    log_q, mask, index = random_batch(3)
    half = log_q.bfloat16().requires_grad_()
    objective = make_objective(cfg, 6)
    report = objective.loss(half, mask, index, 3)
    assert report.loss.dtype == report.weight_share.dtype == report.confidence.dtype == torch.float32
    assert report.loss.item() == objective.loss(half.detach().float(), mask, index, 3).loss.item()
    report.loss.backward()
    assert half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
def test_weight_mean_is_refused_where_the_mass_of_the_weights_is_the_point(kind):
    with pytest.raises(DraftpoolError, match=rf"{kind}.*divides by the sum of the weights.*use anchor_mean"):
        make_objective({"kind": kind, "reduction": "weight_mean"}, 16)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"kind": "d-pace"}, "unknown objective 'd-pace'.*use one of: .*dpace, .*uniform"),
        ({"alpha": 0.5}, "no kind"),
        ({"kind": "dpace", "gamma": 7.0}, "unknown parameter 'gamma'.*it takes: reduction, alpha"),
        ({"kind": "dpace", "alpha": 1.5}, "parameter 'alpha' = 1.5"),
        ({"kind": "dpace", "alpha": "0.5"}, "parameter 'alpha' = '0.5'"),
        ({"kind": "dflash", "gamma": 0.0}, "parameter 'gamma' = 0.0"),
        ({"kind": "head_dependent", "decay": 0.0}, "parameter 'decay' = 0.0"),
        ({"kind": "uniform", "reduction": "mean"}, "parameter 'reduction' = 'mean'"),
        ({"kind": "dpace", "block_size": 8}, "block_size"),
    ],
)
def test_mistakes_in_the_configuration_are_told(cfg, message):
    with pytest.raises(DraftpoolError, match=message):
        make_objective(cfg, 16)


def test_wrong_shapes_are_told():
    log_q, mask, index = random_batch(0)
    with pytest.raises(DraftpoolError, match="one row per anchor with 15 slots"):
        make_objective({"kind": "dpace"}, 16).loss(log_q, mask, index, 3)
    with pytest.raises(DraftpoolError, match="6 sequence"):
        make_objective({"kind": "dpace"}, 6).loss(log_q, mask, index[1:], 3)
