"""Stacked evaluation against every drafter on its own, and whole decodes that use it."""

from __future__ import annotations

import pytest
import torch
from scripted import run
from tiny import TAPS, VOCABULARY, load, random_drafter, token_ids

from draftpool.artefacts import read_table
from draftpool.decoding.evaluation import PoolEvaluation
from draftpool.drafters.block_live import BlockDrafter, load_model
from draftpool.drafters.stacked import StackedDrafters, StackedLinear, StackedNorm, can_stack

SOME = torch.arange(5, VOCABULARY, 3)
OTHER = torch.arange(2, VOCABULARY, 2)
PROMPT = token_ids(11)


def _pool(target, dtype=torch.float32):
    pool = [random_drafter(target, f"d{seed}", seed=seed) for seed in range(2)]
    pool.append(random_drafter(target, "some", vocabulary=SOME, seed=2))
    pool.append(random_drafter(target, "other", vocabulary=OTHER, seed=3))
    for drafter in pool:
        drafter.model.to(dtype)
    return pool


def _read(target, reader, places: list[int]) -> None:
    """Let a drafter read the prompt in several parts."""
    ids = torch.tensor(PROMPT)
    taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
    reader.reset(len(PROMPT) + 8)
    for start, end in zip(places, places[1:], strict=False):
        reader.catch_up(ids[start:end], taps[start:end])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("places", [[0, 11], [0, 4, 5, 11]])
def test_a_stack_drafts_what_its_members_draft(family, places, targets):
    target = load(getattr(targets, family))
    pool = _pool(target)
    stacked = StackedDrafters(pool, target.head_weight)
    _read(target, stacked, places)
    made = stacked.evaluate(7)
    assert stacked.state_bytes() == sum(_state(target, drafter) for drafter in pool)
    for drafter, draft in zip(pool, made, strict=True):
        alone = drafter.draft(7)
        assert draft.ids.tolist() == alone.ids.tolist()
        own = torch.isin(draft.vocabulary, drafter.model.vocabulary)
        assert torch.allclose(draft.log_q[:, own], alone.log_q, atol=1e-5)
        assert draft.log_q[:, ~own].isneginf().all()


def _state(target, drafter) -> int:
    _read(target, drafter, [0, len(PROMPT)])
    return drafter.state_bytes()


def test_stacked_layers_without_packing_are_batched_products():
    torch.manual_seed(0)
    for bias in (True, False):
        layers = [torch.nn.Linear(6, 5, bias=bias, dtype=torch.bfloat16) for _ in range(3)]
        stacked = StackedLinear(layers)
        assert stacked.packed is None and stacked.weight.shape == (3, 5, 6)
        for shape in ((1, 4, 6), (3, 4, 6), (1, 2, 4, 6), (3, 2, 4, 6)):
            x = torch.randn(shape, dtype=torch.bfloat16)
            wanted = torch.stack([layer(x[row if shape[0] > 1 else 0]) for row, layer in enumerate(layers)])
            assert torch.allclose(stacked(x), wanted, atol=0.05), (bias, shape)


def test_stacked_norms_are_the_members_norms():
    from draftpool.drafters.block import RMSNorm

    norms = [RMSNorm(6, 1e-5) for _ in range(3)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    for shape in ((1, 4, 6), (3, 4, 6), (3, 2, 4, 6)):
        x = torch.randn(shape)
        wanted = torch.stack([norm(x[row if shape[0] > 1 else 0]) for row, norm in enumerate(norms)])
        assert torch.allclose(StackedNorm(norms)(x), wanted, atol=1e-6)


def test_only_drafters_of_one_shape_are_stacked(targets):
    target = load(targets.llama)
    same, long = _pool(target)[:2], random_drafter(target, "long", block_size=6)
    assert can_stack(same) and not can_stack([*same, long])
    mixed = PoolEvaluation({"a": same[0], "long": long, "plain": None}, target.head_weight)
    assert mixed.stacked is None and mixed.alone == ["a", "long"]


def test_hedgespec_on_a_stack_decodes_like_hedgespec_on_single_drafters(llama_world):
    world = llama_world
    target = load(world.target, TAPS)
    small, short = (
        BlockDrafter(path.name, load_model(path, target))
        for path in world.drafters
        if path.name in ("small", "short")
    )
    arms = {"small": small, "short": short}
    together, apart = (PoolEvaluation(arms, target.head_weight) for _ in range(2))
    assert together.stacked is not None and not together.alone
    apart.stacked, apart.stacked_names, apart.alone = None, [], list(arms)
    accepted = 0
    for row in read_table(world.heldout[0] / "responses.parquet").itertuples():
        prompt, rows = list(row.prompt_ids), []
        for evaluation in (together, apart):
            result = run(target, prompt, arms, {"kind": "hedgespec"}, limit=40, evaluation=evaluation)
            rows.append([(row["arm"], row["n_accepted"], row["losses"]) for row in result.rounds])
        assert rows[0] == rows[1]
        assert run(target, prompt, {"plain": None}, limit=40).tokens == result.tokens
        accepted += sum(count for _, count, _ in rows[0])
    assert accepted > 0
