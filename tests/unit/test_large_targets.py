"""Targets larger than one device, spread over memory and disk: what they compute, and how stages are told."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from test_plan import TINY, plan_of
from tiny import TAPS, named, responses_cfg, save_target, token_ids

from draftpool.artefacts import read_table
from draftpool.config.environment import SPLITS, prepare_jobs, split_of
from draftpool.config.hardware import DTYPES_VARIABLE
from draftpool.config.load import merge, resolve
from draftpool.data.responses import generate_responses
from draftpool.data.taps import Taps
from draftpool.decoding.lossless import check_lossless
from draftpool.errors import DraftpoolError
from draftpool.targets.hub import TransformersTarget
from draftpool.targets.load import load_target

CPU = torch.device("cpu")
# Some layers in memory, some on disk, among them embedding and head.
SPREAD = {f"model.layers.{layer}": ("cpu", "disk", "disk", "cpu")[layer] for layer in range(4)} | {
    "model.embed_tokens": "disk",
    "model.rotary_emb": "cpu",
    "model.norm": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(scope="module")
def folders(targets, tmp_path_factory):
    """Targets by family; Llama's embedding and head are one tensor."""
    mistral = save_target(tmp_path_factory.mktemp("mistral"), "mistral")
    return {"llama": targets.llama, "qwen3": targets.qwen3, "mistral": mistral}


def _both(folder: Path, dtype: torch.dtype, device_map) -> tuple[TransformersTarget, TransformersTarget]:
    return (
        load_target(folder, TAPS, CPU, dtype, "transformers"),
        load_target(folder, TAPS, CPU, dtype, "transformers", device_map),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_spread_target_computes_what_an_undivided_one_does(family, dtype, folders) -> None:
    one, two = _both(folders[family], dtype, SPREAD)
    places = {name: value.device.type for name, value in two.model.named_parameters()}
    # Read when it is needed: what lies on disk is not there yet.
    assert places["model.layers.1.mlp.up_proj.weight"] == places["model.embed_tokens.weight"] == "meta"
    assert places["model.layers.0.mlp.up_proj.weight"] == "cpu"
    assert two.device == CPU and two.dtype == dtype
    for name in ("embedding", "head_weight"):
        assert torch.equal(getattr(one, name), getattr(two, name)) and getattr(two, name).device == CPU
    assert (two.head_weight is two.embedding) == (one.head_weight is one.embedding) == (family == "llama")
    caches = [target.new_cache(24) for target in (one, two)]
    for n, back in ((9, 4), (1, 0), (5, 5), (3, 0)):
        ids = torch.tensor([token_ids(n, n)])
        outputs = [target.forward(ids, cache) for target, cache in zip((one, two), caches, strict=True)]
        assert torch.equal(outputs[0].logits, outputs[1].logits)
        assert torch.equal(outputs[0].taps, outputs[1].taps) and outputs[1].taps.shape[-1] > 0
        for cache in caches:
            cache.rollback(back)


def test_a_name_leaves_the_layers_to_accelerate(folders) -> None:
    for name in ("auto", "balanced", "balanced_low_0", "sequential"):
        one, two = _both(folders["qwen3"], torch.float32, name)
        ids = torch.tensor([token_ids(6)])
        outputs = [target.forward(ids, target.new_cache(6)) for target in (one, two)]
        assert torch.equal(outputs[0].logits, outputs[1].logits)


def test_a_spread_target_answers_as_an_undivided_one(llama_world, tmp_path) -> None:
    world, cfg = llama_world, responses_cfg(backend="transformers", max_new_tokens=8)
    generate_responses(cfg, world.target, world.prompts[0], tmp_path / "one")
    generate_responses(cfg | {"device_map": SPREAD}, world.target, world.prompts[0], tmp_path / "two")
    one, two = (read_table(tmp_path / name / "responses.parquet") for name in ("one", "two"))
    assert one.drop(columns=["prompt_ids", "response_ids"]).equals(
        two.drop(columns=["prompt_ids", "response_ids"])
    )
    rows = int(one.response_offset.max() + len(one.response_ids.iloc[-1]) - 1)
    assert [list(ids) for ids in one.response_ids] == [list(ids) for ids in two.response_ids]
    assert torch.equal(*(Taps(tmp_path / name).rows(1, 0, rows) for name in ("one", "two")))


def test_drafters_beside_a_spread_target_are_lossless(llama_world, tmp_path) -> None:
    world = llama_world
    cfg = {
        "drafters": named(world),
        "taps": TAPS,
        "backend": "transformers",
        "device_map": SPREAD,
        "device": "cpu",
        "max_prompt_tokens": 20,
        "seed": 0,
        "prompts_per_domain": 3,
        "max_new_tokens": 16,
        "bfloat16_prompts": 0,
    }
    check_lossless(cfg, world.target, world.prompts, world.drafters, tmp_path / "lossless.json")
    told = json.loads((tmp_path / "lossless.json").read_text())
    assert told["float32"]["mismatches"] == 0 and told["float32"]["accepted"] > 0


def test_the_fast_backend_refuses_to_spread(targets) -> None:
    with pytest.raises(DraftpoolError, match="target.device_map.*one device -> use `backend: transformers`"):
        load_target(targets.llama, TAPS, CPU, torch.float32, "fast", "auto")
    with pytest.raises(DraftpoolError, match="device_map. needs .backend: transformers"):
        plan_of({"target": {"device_map": "auto"}})


def test_stages_that_run_the_target_are_told_and_the_rest_is_not() -> None:
    plain, spread = (
        plan_of({"target": {"backend": "transformers"} | more}) for more in ({}, {"device_map": "balanced"})
    )
    assert plain.target.id == spread.target.id
    for stage in ("generate_responses", "check_lossless", "score_pool", "decode_live", "profile_costs"):
        for artefact in spread.by_stage()[stage].values():
            assert artefact.cfg["device_map"] == "balanced"
        assert not any("device_map" in artefact.cfg for artefact in plain.by_stage()[stage].values())
    assert not any("device_map" in made.cfg for made in spread.by_stage()["train_drafter"].values())


# --- how trainings are split ------------------------------------------------------------------------------


def test_jobs_are_told_how_they_are_split(monkeypatch) -> None:
    monkeypatch.setenv(SPLITS, "")
    monkeypatch.setenv(DTYPES_VARIABLE, "")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("DRAFTPOOL_PROGRESS", "")
    training = {"processes": 2, "accumulate": 2, "batch_sequences": 4}
    plan = plan_of({"drafters": {"general": {"training": training}}})
    made = plan.by_stage()["train_drafter"]
    prepare_jobs(plan)
    split = {id: split_of(id) for id in made}
    assert {(artefact.processes, artefact.accumulate) for artefact in made.values()} == {(2, 2), (1, 1)}
    assert split == {id: (artefact.processes, artefact.accumulate) for id, artefact in made.items()}
    assert split_of("anything else") == (1, 1)
    # Jobs that are not split are not listed.
    assert len(json.loads(os.environ[SPLITS])) == sum(pair == (2, 2) for pair in split.values())


def test_more_parts_than_sequences_are_refused() -> None:
    training = {"training": {"processes": 3, "accumulate": 2, "batch_sequences": 5}}
    with pytest.raises(DraftpoolError, match="`processes` 3 x `accumulate` 2 are more parts than"):
        resolve(merge(copy.deepcopy(TINY), {"drafters": {"general": training}}))
