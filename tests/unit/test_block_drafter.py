"""The block drafter: training mask against inference, what a slot sees, and how it starts and is kept."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scripted import fresh_draft
from tiny import TAPS, VOCABULARY, load, random_drafter, reference_of, token_ids, tokenizer, training_cfg

from draftpool.artefacts import read_json, write_json
from draftpool.drafters.block import BlockDrafterModel
from draftpool.drafters.block_config import BlockConfig, config_for, mask_token, reduced_vocabulary
from draftpool.drafters.block_live import BlockDrafter, load_model
from draftpool.drafters.drafter_folder import read_drafter, save_drafter
from draftpool.errors import DraftpoolError
from draftpool.training.batches import ResponseSet, context_bias, make_batch
from draftpool.training.initialise import (
    parameter_hash,
    start_block_from_target,
    start_from_drafter,
    start_random,
)
from draftpool.training.train import batch_loss, train_drafter
from draftpool.training.trainees import BlockTrainee

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(params=FAMILIES)
def target(request, targets):
    return load(getattr(targets, request.param), TAPS)


@pytest.fixture
def llama(targets):
    return load(targets.llama, TAPS)


def _taps(target, rows: list[list[int]]) -> torch.Tensor:
    """Taps [rows, longest, taps x hidden], padded with noise that no block may see."""
    longest = max(map(len, rows))
    taps = torch.randn(
        len(rows), longest, len(TAPS) * target.hf_config.hidden_size, generator=torch.Generator()
    )
    for row, ids in enumerate(rows):
        taps[row, : len(ids)] = target.forward(torch.tensor([ids]), target.new_cache(len(ids)), "none").taps[
            0
        ]
    return taps


def _blocks(model, taps, anchors, positions, bias="mask"):
    places = torch.arange(taps.shape[1]).expand(taps.shape[:2])
    bias = context_bias(positions, taps.shape[1]) if bias == "mask" else bias
    with torch.no_grad():
        return model.logits(model.blocks(anchors, positions, model.context(taps, places), bias))


def _naive_log_q(model: BlockDrafterModel, taps: torch.Tensor, anchor: int) -> torch.Tensor:
    """DFlash head by head and slot by slot, positions turned by complex numbers, all in float64."""
    state, config = {name: tensor.double() for name, tensor in model.state_dict().items()}, model.config
    half, size = config.head_dim // 2, config.block_size

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.eps).sqrt() * state[f"{name}.weight"]

    def heads(x, name, count, places=None):
        made = x @ state[f"{name}_proj.weight"].T + state.get(f"{name}_proj.bias", 0.0)
        made = made.view(len(x), count, config.head_dim)
        made = norm(made, f"{name}_norm") if f"{name}_norm.weight" in state else made
        if places is None:
            return made
        angles = places[:, None] * config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(made[..., :half], made[..., half:]) * torch.exp(1j * angles)[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1)

    places = torch.arange(len(taps) + size, dtype=torch.float64)
    fused = norm(taps.double() @ state["fuse.weight"].T, "fuse_norm")
    x = model.embedding.double()[[anchor] + [config.mask_token_id] * (size - 1)]
    for index in range(config.n_layers):
        layer = f"layers.{index}."
        inner = norm(x, f"{layer}input_norm")
        # Context and block share the weights of keys and values; every slot sees all of both.
        everything = torch.cat((fused, inner))
        keys = heads(everything, f"{layer}k", config.kv_heads, places)
        values = heads(everything, f"{layer}v", config.kv_heads)
        queries = heads(inner, f"{layer}q", config.heads, places[-size:])
        mixed = []
        for slot in range(size):
            for head in range(config.heads):
                shared = head // (config.heads // config.kv_heads)
                scores = keys[:, shared] @ queries[slot, head] / config.head_dim**0.5
                mixed.append(scores.softmax(0) @ values[:, shared])
        x = x + torch.cat(mixed).view(size, -1) @ state[f"{layer}o_proj.weight"].T
        inner = norm(x, f"{layer}post_norm")
        gate, up = (inner @ state[f"{layer}{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ state[f"{layer}down_proj.weight"].T
    return (norm(x, "norm")[1:] @ model.head.double().T).log_softmax(-1)


@pytest.mark.parametrize("n_layers", [1, 3])
def test_a_draft_equals_the_formula(target, n_layers) -> None:
    drafter, ids = random_drafter(target, "d", n_layers=n_layers, block_size=5), token_ids(14)
    naive = _naive_log_q(drafter.model, _taps(target, [ids])[0, :-1], ids[-1])
    draft = fresh_draft(drafter, target, ids)
    torch.testing.assert_close(draft.log_q.double(), naive, atol=5e-4, rtol=1e-4)
    assert torch.equal(draft.ids, naive.argmax(-1))


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_training_mask_equals_one_block_at_a_time(target, n_layers) -> None:
    drafter = random_drafter(target, "d", n_layers=n_layers, block_size=5)
    rows = [token_ids(length, seed) for seed, length in enumerate((17, 9, 23))]
    positions = torch.tensor([[16, 3, 1, 9], [8, 1, 2, 5], [22, 4, 11, 17]])
    anchors = torch.tensor(
        [[row[place] for place in places] for row, places in zip(rows, positions, strict=True)]
    )
    logits = _blocks(drafter.model, _taps(target, rows), anchors, positions)
    assert logits.shape == (3, 4, 4, VOCABULARY)
    for row, ids in enumerate(rows):
        for number, place in enumerate(positions[row].tolist()):
            alone = fresh_draft(drafter, target, ids[: place + 1])
            torch.testing.assert_close(logits[row, number].log_softmax(-1), alone.log_q, atol=2e-4, rtol=1e-4)
            assert torch.equal(logits[row, number].argmax(-1), alone.ids)


def test_a_slot_sees_nothing_at_or_behind_its_anchor_and_no_other_block(llama) -> None:
    drafter = random_drafter(llama, "d")
    ids = token_ids(20)
    taps, positions = _taps(llama, [ids]), torch.tensor([[6, 12, 3]])
    anchors = torch.tensor([[ids[6], ids[12], ids[3]]])
    before = _blocks(drafter.model, taps, anchors, positions)
    changed, others = taps.clone(), anchors.clone()
    changed[:, 6:] = torch.randn(changed[:, 6:].shape) * 50
    others[0, 1:] = torch.tensor([7, 8])
    after = _blocks(drafter.model, changed, others, positions)
    assert torch.equal(after[0, 0], before[0, 0])
    assert not torch.allclose(after[0, 1], before[0, 1], atol=1e-2)
    moved = _blocks(drafter.model, taps, anchors, torch.tensor([[6, 15, 9]]))
    assert torch.equal(moved[0, 0], before[0, 0])
    # Everything before the anchor is seen, by every slot, and so is the anchor.
    for place in range(6):
        changed = taps.clone()
        changed[:, place] += 5.0
        after = _blocks(drafter.model, changed, anchors, positions)
        assert ((after - before)[0, 0].abs().amax(-1) > 1e-3).all()
    after = _blocks(drafter.model, taps, torch.tensor([[ids[6] - 1, ids[12], ids[3]]]), positions)
    assert ((after - before)[0, 0].abs().amax(-1) > 1e-3).all()


def test_slots_see_each_other(llama) -> None:
    ids = token_ids(12)
    long, short = (random_drafter(llama, "d", n_layers=1, block_size=size) for size in (5, 4))
    short.model.load_state_dict(long.model.state_dict())
    one, two = (fresh_draft(drafter, llama, ids) for drafter in (long, short))
    # The same weights with one slot less: earlier slots change, so they saw the last one.
    assert ((one.log_q[:3] - two.log_q).abs().amax(-1) > 1e-3).all()


def test_only_the_target_s_taps_make_the_context(llama) -> None:
    drafter, ids = random_drafter(llama, "d"), token_ids(10)
    taps = _taps(llama, [ids])[0, :-1]
    drafts = []
    for chunks, tokens in (([9], ids[:-1]), ([4, 1, 4], ids[:-1]), ([9], [5] * 9)):
        drafter.reset(30)
        place = 0
        for number, count in enumerate(chunks):
            read = drafter.catch_up if number else drafter.prefill
            read(torch.tensor(tokens[place : place + count]), taps[place : place + count])
            place += count
        drafter.catch_up(torch.tensor([]), taps[:0])
        drafts.append(drafter.draft(ids[-1]))
    for draft in drafts[1:]:
        assert torch.equal(draft.ids, drafts[0].ids)
        torch.testing.assert_close(draft.log_q, drafts[0].log_q, atol=1e-4, rtol=1e-4)
    assert drafter.state_bytes() == 2 * 2 * 1 * 16 * 4 * 9


def test_d17_a_reduced_vocabulary_proposes_its_own_ids_only(llama) -> None:
    vocabulary = torch.tensor([5, 17, 40, 41, 99, 119])
    small = random_drafter(llama, "small", vocabulary=vocabulary)
    full = random_drafter(llama, "full")
    full.model.load_state_dict(small.model.state_dict() | {"vocabulary": torch.arange(VOCABULARY)})
    ids = token_ids(12)
    one, two = (fresh_draft(drafter, llama, ids) for drafter in (small, full))
    assert torch.equal(one.vocabulary, vocabulary) and one.log_q.shape == (3, 6)
    torch.testing.assert_close(one.log_q, two.log_q[:, vocabulary].log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert torch.equal(one.ids, vocabulary[two.log_q[:, vocabulary].argmax(-1)])


@pytest.mark.parametrize("size", [None, 200, 3, 6, 40])
def test_the_reduced_vocabulary_is_the_most_frequent_ids_then_the_lowest(size) -> None:
    answers = [[50, 9, 9, 50], [9, 30, 70, 30], [2]]
    chosen = reduced_vocabulary(answers, size, 100).tolist()
    if size is None or size >= 100:
        assert chosen == list(range(100))
    else:
        ranked = [9, 30, 50, 2, 70] + [token for token in range(100) if token not in (9, 30, 50, 2, 70)]
        assert chosen == sorted(ranked[:size])


def test_the_mask_token_is_one_that_text_does_not_hold() -> None:
    words = tokenizer()
    assert mask_token(words) == words.unk_token_id == 1
    words.add_special_tokens({"mask_token": "<mask>"})
    assert mask_token(words) == words.mask_token_id > 1


# --- folders --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(llama, tmp_path):
    drafter = random_drafter(llama, "d", vocabulary=torch.arange(0, VOCABULARY, 2))
    (tmp_path / "d").mkdir()
    save_drafter(tmp_path / "d", drafter.model.config, drafter.model.state_dict())
    return drafter, tmp_path / "d"


def test_a_saved_drafter_drafts_the_same(saved, llama) -> None:
    drafter, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    again, ids = BlockDrafter("again", load_model(folder, llama)), token_ids(15)
    one, two = fresh_draft(drafter, llama, ids), fresh_draft(again, llama, ids)
    assert torch.equal(one.log_q, two.log_q) and torch.equal(one.ids, two.ids)
    # Frozen parts are the target's and are not kept twice.
    assert not {"embedding", "head"} & load_file(folder / "model.safetensors").keys()


def test_a_drafter_of_another_target_is_refused_by_name(saved, targets, llama) -> None:
    _, folder = saved
    with pytest.raises(DraftpoolError, match="hidden_size 48, the target needs 32"):
        load_model(folder, load(targets.qwen3, TAPS))
    with pytest.raises(DraftpoolError, match=r"taps \[0, 1, 2\], the target needs \[0, 2\]") as caught:
        load_model(folder, load(targets.llama, [0, 2]))
    assert str(folder) in str(caught.value)
    config = read_json(folder / "config.json")
    for name in ("target_vocabulary", "target_layers"):
        write_json(folder / "config.json", config | {name: 7})
        with pytest.raises(DraftpoolError, match=f"{name} 7"):
            load_model(folder, llama)


@pytest.mark.parametrize("damage", ["cut short", "no weights", "other keys", "no config", "unknown key"])
def test_a_damaged_drafter_is_one_clear_line(damage, saved, llama) -> None:
    _, folder = saved
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "other keys":
        save_file({"vocabulary": torch.arange(3)}, weights)
    elif damage == "no config":
        config.unlink()
    else:
        write_json(config, read_json(config) | {"colour": "red"})
    with pytest.raises(DraftpoolError) as caught:
        load_model(folder, llama)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value) and "->" in str(caught.value)


# --- starts ---------------------------------------------------------------------------------------------


def _new_model(target, n_layers: int = 2, block_size: int = 4) -> BlockDrafterModel:
    config = config_for(target.hf_config, TAPS, 1, n_layers, block_size)
    return BlockDrafterModel(config, target.embedding, target.head_weight, torch.arange(VOCABULARY))


def test_random_starts_are_functions_of_the_seed(target) -> None:
    hashes = []
    for seed in (0, 0, 1):
        model = _new_model(target)
        start_random(model, seed)
        hashes.append(parameter_hash(model))
        weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.dim() > 1])
        assert float(weights.std()) == pytest.approx(0.02, rel=0.05)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                assert torch.all(parameter == (0.0 if name.endswith("bias") else 1.0)), name
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_starting_from_the_target_copies_layers_and_fuses_by_the_identity(family, targets) -> None:
    target, reference = load(getattr(targets, family), TAPS), reference_of(getattr(targets, family))
    model = _new_model(target)
    start_block_from_target(model, reference.state_dict(), 0)
    for index, layer in enumerate(model.layers):
        copied = reference.model.layers[2 + index]
        for part in "qkvo":
            ours, theirs = getattr(layer, f"{part}_proj"), getattr(copied.self_attn, f"{part}_proj")
            assert torch.equal(ours.weight, theirs.weight)
            assert (ours.bias is None) == (theirs.bias is None)
            assert ours.bias is None or torch.equal(ours.bias, theirs.bias)
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert torch.equal(getattr(layer, part).weight, getattr(copied.mlp, part).weight)
        assert torch.equal(layer.input_norm.weight, copied.input_layernorm.weight)
        assert torch.equal(layer.post_norm.weight, copied.post_attention_layernorm.weight)
        if family == "qwen3":
            assert torch.equal(layer.q_norm.weight, copied.self_attn.q_norm.weight)
            assert torch.equal(layer.k_norm.weight, copied.self_attn.k_norm.weight)
    width = target.hf_config.hidden_size
    assert torch.equal(model.fuse.weight[:, -width:], torch.eye(width))
    rest = model.fuse.weight.detach()[:, :-width]
    assert 0.001 < float(rest.std()) < 0.003
    assert torch.equal(model.fuse_norm.weight, reference.model.layers[-1].input_layernorm.weight)
    assert torch.equal(model.norm.weight, reference.model.norm.weight)
    # By the deepest tap alone, the deepest draft layer sees exactly the keys and values of that layer.
    ids, cache = torch.tensor([token_ids(7)]), target.new_cache(7)
    taps = target.forward(ids, cache, "none").taps
    with torch.no_grad():
        model.fuse.weight[:, :-width] = 0.0
        keys, values = model.context(taps, torch.arange(7)[None])[-1]
    # TAPS[-1] = 2 is the input of layer 3, the last of four.
    torch.testing.assert_close(keys, cache.keys[3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values, cache.values[3], atol=1e-4, rtol=1e-4)


def test_starts_that_do_not_fit_are_refused(llama, targets) -> None:
    with pytest.raises(DraftpoolError, match="5 draft layers cannot start from a target of 4"):
        start_block_from_target(_new_model(llama, n_layers=5), reference_of(targets.llama).state_dict(), 0)
    with pytest.raises(DraftpoolError, match="init: random"):
        start_block_from_target(_new_model(llama), {}, 0)


def test_starting_from_a_drafter_takes_its_weights(llama, tmp_path) -> None:
    source = _new_model(llama)
    start_random(source, 3)
    (tmp_path / "d").mkdir()
    save_drafter(tmp_path / "d", source.config, source.state_dict())
    config = config_for(llama.hf_config, TAPS, 1, 2, 4)
    vocabulary = torch.arange(10, 60)
    model = BlockDrafterModel(config, llama.embedding, llama.head_weight[vocabulary], vocabulary)
    start_from_drafter(model, tmp_path / "d", "block")
    # The specialist keeps the vocabulary of its own answers.
    assert parameter_hash(model) == parameter_hash(source) and torch.equal(model.vocabulary, vocabulary)
    for shape, named in (({"n_layers": 1}, "n_layers"), ({"block_size": 6}, "block_size")):
        with pytest.raises(DraftpoolError, match=f"differs in {named}"):
            start_from_drafter(_new_model(llama, **shape), tmp_path / "d", "block")


def test_a_specialist_continues_the_generalist(llama_world, tmp_path) -> None:
    world, root = llama_world, tmp_path
    cfg = training_cfg(
        3, init="drafter", domains=["tales"], model={"n_layers": 2, "block_size": 4, "draft_vocab": None}
    )
    train_drafter(cfg, world.target, world.train[:1], world.drafters[2], root / "state", root / "specialist")
    (start,) = {read_json(root / "specialist" / "provenance.json")["initial_parameters"]}
    _, state = read_drafter(world.drafters[2], BlockConfig)
    source = _new_model(load(world.target, TAPS))
    source.load_state_dict(state)
    assert parameter_hash(source) == start
    shutil.rmtree(root / "specialist")
    wide = training_cfg(3, init="drafter", model={"n_layers": 2, "block_size": 6, "draft_vocab": None})
    with pytest.raises(DraftpoolError, match="differs in block_size"):
        train_drafter(
            wide, world.target, world.train[:1], world.drafters[2], root / "state", root / "specialist"
        )
    assert not (root / "specialist").exists()


def test_the_loss_is_computed_from_the_supervised_slots(llama_world, llama) -> None:
    from draftpool.training.objectives.base import make_objective

    data = ResponseSet(llama_world.train, None)
    model = load_model(llama_world.drafters[2], load(llama_world.target, TAPS))
    columns = np.where(np.arange(VOCABULARY) % 3 > 0, np.arange(VOCABULARY), -1)
    batch = make_batch(data, 0, 0, 4, 30, 4, columns)
    report = batch_loss(
        BlockTrainee(model), batch, make_objective({"kind": "uniform", "reduction": "weight_mean"}, 4), False
    )
    total, count = 0.0, 0
    logits = _blocks(model, batch.taps, batch.anchors, batch.positions)
    for place in batch.mask.nonzero().tolist():
        total -= float(logits[tuple(place)].log_softmax(-1)[batch.labels[tuple(place)]])
        count += 1
    assert count > 20 and float(report.loss) == pytest.approx(total / count, rel=1e-4)
