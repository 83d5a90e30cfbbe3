"""Training of eagle and independent drafters: what the loss sees, that it learns, and that a killed run ends equal."""

from __future__ import annotations

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tiny import TAPS, VOCABULARY, load, reference_of, training_cfg

from draftpool.artefacts import read_table
from draftpool.drafters.load import draft_everywhere, load_drafter
from draftpool.errors import DraftpoolError
from draftpool.targets.tail import load_tail
from draftpool.training import train
from draftpool.training.batches import ResponseSet, make_batch
from draftpool.training.objectives.base import make_objective
from draftpool.training.train import batch_loss, train_drafter
from draftpool.training.trainees import new_trainee

MODELS = {
    "eagle": {"draft_tokens": 3, "draft_vocab": None, "own_head": False},
    "independent": {"n_layers": 2, "layers": None, "draft_tokens": 3, "draft_vocab": None},
}
CPU = torch.device("cpu")


def cfg_of(kind: str, steps: int = 60, objective: str = "cross_entropy", **changes) -> dict:
    model = MODELS[kind] | changes.pop("model", {})
    cfg = training_cfg(steps, {"kind": objective, "reduction": "weight_mean"}, model=model)
    return cfg | {"kind": kind, "domains": ["tales", "sums"], "init": "target_layers"} | changes


def trained(world, root, kind: str, name: str, **options):
    cfg = cfg_of(kind, **options)
    train_drafter(cfg, world.target, world.train, None, root / f"state-{name}", root / name)
    return root / name


def mean_accepted(world, folder) -> float:
    """Mean accepted tokens over all anchors of the training answers."""
    target = load(world.target, TAPS)
    drafter, found = load_drafter("d", folder, target), []
    for path in world.train:
        for row in read_table(path / "responses.parquet").itertuples():
            prompt, answer = list(map(int, row.prompt_ids)), list(map(int, row.response_ids))
            ids = torch.tensor(prompt + answer[:-1])
            taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
            drafter.reset(len(prompt) + len(answer))
            made = draft_everywhere(drafter, prompt, answer, taps)
            for place, ids in enumerate(made.ids.tolist()):
                ahead = answer[place + 1 :]
                n = 0
                while n < min(3, len(ahead)) and ids[n] == ahead[n]:
                    n += 1
                found.append(n)
    return float(np.mean(found))


@pytest.mark.parametrize("kind", list(MODELS))
def test_training_learns_the_answers(kind, llama_world, tmp_path) -> None:
    before = mean_accepted(llama_world, trained(llama_world, tmp_path, kind, "before", steps=1))
    after = mean_accepted(llama_world, trained(llama_world, tmp_path, kind, "after", steps=150))
    assert after > before + 0.3
    log = pd.read_csv(tmp_path / "after" / "training.csv")
    slots = 3 if kind == "eagle" else 1
    assert log.filter(like="confidence_").shape[1] == slots
    assert log["loss"].tail(15).mean() < 0.8 * log["loss"].head(15).mean()


@pytest.mark.parametrize("kind", list(MODELS))
def test_d41_a_killed_training_ends_bit_equal(kind, llama_world, tmp_path, monkeypatch) -> None:
    whole = trained(llama_world, tmp_path, kind, "whole", steps=12)
    cfg, state, out = cfg_of(kind, 12), tmp_path / "state", tmp_path / "killed"
    make, calls = train.make_batch, []

    def killed(*arguments):
        calls.append(0)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return make(*arguments)

    monkeypatch.setattr(train, "make_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        train_drafter(cfg, llama_world.target, llama_world.train, None, state, out)
    assert not out.exists() and (state / "checkpoint.safetensors").exists()
    train_drafter(cfg, llama_world.target, llama_world.train, None, state, out)
    left, right = load_file(whole / "model.safetensors"), load_file(out / "model.safetensors")
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _batch(world, slots: int, columns=None):
    columns = np.arange(VOCABULARY) if columns is None else columns
    return make_batch(ResponseSet(world.train, None), 0, 0, 3, 30, slots + 1, columns)


def test_an_eagle_head_is_unrolled_on_its_own_outputs_and_the_true_tokens(llama_world) -> None:
    """Against one anchor at a time, step after step, by the live drafter fed the true tokens."""
    world, target = llama_world, load(llama_world.target, TAPS)
    data = ResponseSet(world.train, None)
    trainee = new_trainee(cfg_of("eagle"), world.target, data, None, CPU)
    batch = _batch(world, 3)
    with torch.no_grad():
        log_q = trainee.module.logits(trainee.hidden(batch)).log_softmax(-1)
    from draftpool.drafters.eagle_live import EagleDrafter

    live = EagleDrafter("live", trainee.module.to(target.dtype).eval().requires_grad_(False))
    checked = 0
    for row, column in batch.mask.any(-1).nonzero().tolist()[::7]:
        place = int(batch.positions[row, column])
        tokens = batch.tokens[row]
        live.reset(place + 4)
        live.prefill(tokens[:place], batch.taps[row, :place].float())
        true = tokens[place + 1 :].tolist()

        def teacher(rows, slot, true=true):
            return torch.tensor([true[slot] if slot < len(true) else 0])

        made = live.draft(int(tokens[place]), teacher)
        count = int(batch.mask[row, column].sum())
        torch.testing.assert_close(log_q[row, column, :count], made.log_q[:count], atol=1e-3, rtol=1e-3)
        checked += 1
    assert checked > 5


def test_a_small_model_reads_whole_texts(llama_world, tmp_path) -> None:
    """Hidden states of training give the log-probabilities that the live drafter drafts from."""
    world, target = llama_world, load(llama_world.target, TAPS)
    folder = trained(world, tmp_path, "independent", "d", steps=3)
    live = load_drafter("d", folder, target)
    cfg = cfg_of("independent", init="drafter")
    trainee = new_trainee(cfg, world.target, ResponseSet(world.train, None), folder, CPU)
    batch = _batch(world, 1)
    with torch.no_grad():
        log_q = torch.nn.functional.linear(trainee.hidden(batch), trainee.head).log_softmax(-1)
    checked = 0
    for row, column in batch.mask.any(-1).nonzero().tolist()[::5]:
        place, tokens = int(batch.positions[row, column]), batch.tokens[row]
        live.reset(place + 4)
        live.prefill(tokens[:place], batch.taps[row, :place])
        made = live.draft(int(tokens[place]))
        torch.testing.assert_close(log_q[row, column, 0], made.log_q[0], atol=1e-3, rtol=1e-3)
        checked += 1
    assert checked > 5


def test_copied_layers_are_those_of_the_target(llama_world) -> None:
    world, reference = llama_world, reference_of(llama_world.target).state_dict()
    cfg = cfg_of("independent", model={"layers": [1, 3]})
    data = ResponseSet(world.train, None)
    state = new_trainee(cfg, world.target, data, None, CPU).module.decoder.state_dict()
    for place, source in enumerate((1, 3)):
        name = "self_attn.q_proj.weight"
        assert torch.equal(state[f"layers.{place}.{name}"], reference[f"model.layers.{source}.{name}"])
    assert torch.equal(state["norm.weight"], reference["model.norm.weight"])
    for layers in ([0, 4], [1, 1], [2]):
        with pytest.raises(DraftpoolError, match="rising layer numbers from 0 to 3"):
            new_trainee(cfg_of("independent", model={"layers": layers}), world.target, data, None, CPU)


def test_the_tail_of_the_target_gives_its_own_distribution(llama_world, qwen3_world) -> None:
    for world in (llama_world, qwen3_world):
        target, batch = load(world.target, TAPS), _batch(world, 3)
        tail = load_tail(world.target, TAPS, CPU)
        hidden = tail.hidden_at(batch.taps, batch.positions, 3)
        made = torch.nn.functional.linear(hidden, tail.head)
        for row, column in batch.mask.any(-1).nonzero().tolist()[::9]:
            tokens, place = batch.tokens[row], int(batch.positions[row, column])
            count = int(batch.mask[row, column].sum())
            ids = tokens[: place + count]
            logits = target.forward(ids[None], target.new_cache(len(ids))).logits[0]
            expected = logits[place : place + count].softmax(-1)
            # Taps are kept in bfloat16.
            torch.testing.assert_close(made[row, column, :count].softmax(-1), expected, atol=0.05, rtol=0.2)


@pytest.mark.parametrize("kind", ["eagle", "independent", "block"])
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "tvd"])
def test_distribution_objectives_see_drafter_and_target(kind, objective, llama_world) -> None:
    """The loss of a batch from dense distributions, one slot at a time."""
    world, data = llama_world, ResponseSet(llama_world.train, None)
    model = MODELS.get(kind, {"n_layers": 2, "block_size": 4}) | {"draft_vocab": 60}
    cfg = cfg_of(kind if kind != "block" else "eagle", objective=objective) | {"kind": kind, "model": model}
    trainee = new_trainee(cfg, world.target, data, None, CPU)
    columns = np.full(VOCABULARY, -1)
    columns[trainee.vocabulary.numpy()] = np.arange(60)
    batch, tail = _batch(world, trainee.slots, columns), load_tail(world.target, TAPS, CPU)
    made = make_objective({"kind": objective, "reduction": "weight_mean"}, trainee.slots + 1, kind)
    report = batch_loss(trainee, batch, made, False, tail)
    assert torch.isfinite(report.loss) and report.loss > 0
    with torch.no_grad():
        q = torch.nn.functional.linear(trainee.hidden(batch), trainee.head).double().softmax(-1)
        hidden = tail.hidden_at(batch.taps, batch.positions, trainee.slots)
        p = torch.nn.functional.linear(hidden, tail.head).double().softmax(-1)[..., trainee.vocabulary]
    whole = p / p.sum(-1, keepdim=True)
    rows = {
        "forward_kl": (whole * (whole.log() - q.log())).sum(-1),
        "reverse_kl": (q * (q.log() - whole.log())).sum(-1),
        "tvd": 1 - torch.minimum(p, q).sum(-1),
    }[objective]
    assert float(report.loss) == pytest.approx(float(rows[batch.mask].mean()), rel=1e-3)
    report.loss.backward()
    assert any(
        parameter.grad is not None and parameter.grad.any() for parameter in trainee.module.parameters()
    )


def test_specialists_start_from_a_drafter_of_their_own_kind(llama_world, tmp_path) -> None:
    world = llama_world
    general = {kind: trained(world, tmp_path, kind, kind, steps=3) for kind in MODELS}
    for kind, folder in general.items():
        cfg = cfg_of(kind, 2, init="drafter")
        train_drafter(cfg, world.target, world.train[:1], folder, tmp_path / "s", tmp_path / "special")
        shutil.rmtree(tmp_path / "special")
    with pytest.raises(DraftpoolError, match="is of kind eagle, not independent"):
        cfg = cfg_of("independent", 2, init="drafter")
        train_drafter(
            cfg, world.target, world.train[:1], general["eagle"], tmp_path / "s", tmp_path / "special"
        )
    assert not (tmp_path / "special").exists()


def test_dpace_on_a_sequential_drafter_is_refused_with_the_reason(llama_world, tmp_path) -> None:
    for kind in MODELS:
        with pytest.raises(DraftpoolError, match="drafted at once from the same prefix"):
            trained(llama_world, tmp_path, kind, "refused", objective="dpace")


def test_a_head_of_its_own_goes_on_row_by_row_of_another_vocabulary(llama_world, tmp_path) -> None:
    world = llama_world
    model = {"draft_vocab": 40, "own_head": True}
    general = trained(world, tmp_path, "eagle", "general", steps=2, model=model)
    old = load_file(general / "model.safetensors")
    data = ResponseSet(world.train[:1], None)
    cfg = cfg_of("eagle", init="drafter", model=model)
    made = new_trainee(cfg, world.target, data, general, CPU)
    assert made.vocabulary.tolist() != old["vocabulary"].tolist()
    known = {token: row for row, token in enumerate(old["vocabulary"].tolist())}
    shared = 0
    for row, token in enumerate(made.vocabulary.tolist()):
        if token in known:
            assert torch.equal(made.head[row], old["head"][known[token]])
            shared += 1
    assert 20 < shared < 40
