"""The target model: the fast path against transformers, rollback, taps, and fetching it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    FAMILIES,
    LAYERS,
    MAX_POSITIONS,
    causal_model,
    load,
    reference_of,
    save_target,
    token_ids,
    tokenizer,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftpool.artefacts import read_json
from draftpool.drafters.block_config import mask_token
from draftpool.errors import DraftpoolError
from draftpool.targets.base import check_taps, default_taps
from draftpool.targets.fast import FastTarget
from draftpool.targets.fetch import fetch_target
from draftpool.targets.hub import TransformersTarget
from draftpool.targets.load import (
    GENERAL_TOKENIZERS,
    end_ids,
    load_target,
    load_tokenizer,
    load_weights,
    prompt_ids,
)
from draftpool.targets.weights import described_mask_token, read_config

TAPS = [0, 2]
CPU = torch.device("cpu")


def _reference(model, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, vocabulary] and taps [n, taps x hidden] by transformers, one plain pass."""
    outputs = []
    hooks = [
        model.model.layers[tap].register_forward_hook(
            lambda _, __, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
        for tap in TAPS
    ]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.cat([output.view(len(ids), -1) for output in outputs], dim=-1)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=[*FAMILIES, "transformers"])
def pair(request, targets):
    """A target of ours and the same model in transformers."""
    if request.param == "transformers":
        reference = reference_of(targets.llama)
        return TransformersTarget(reference, TAPS), reference
    folder = getattr(targets, request.param)
    target = load(folder, TAPS)
    assert isinstance(target, FastTarget)
    return target, reference_of(folder)


def test_prefill_blocks_and_single_tokens_equal_transformers(pair) -> None:
    target, reference = pair
    ids = token_ids(41)
    logits, taps = _reference(reference, ids)
    cache, place = target.new_cache(len(ids)), 0
    for width in (17, 1, 6, 1, 1, 8, 1, 6):
        output = target.forward(torch.tensor([ids[place : place + width]]), cache)
        _close(output.logits[0], logits[place : place + width])
        _close(output.taps[0], taps[place : place + width])
        place += width
        assert cache.lengths == [place]
    assert place == len(ids)


def test_a_first_single_token_equals_transformers(pair) -> None:
    target, reference = pair
    ids = token_ids(3, seed=1)
    cache = target.new_cache(8)
    rows = [target.forward(torch.tensor([[token]]), cache).logits[0, 0] for token in ids]
    _close(torch.stack(rows), _reference(reference, ids)[0])


def test_logits_of_all_of_the_last_and_of_none(pair) -> None:
    target, _ = pair
    ids = torch.tensor([token_ids(9)])
    full = target.forward(ids, target.new_cache(9))
    last = target.forward(ids, target.new_cache(9), "last")
    none = target.forward(ids, target.new_cache(9), "none")
    assert full.logits.shape[1] == 9 and last.logits.shape[1] == 1 and none.logits is None
    _close(last.logits, full.logits[:, -1:])
    _close(none.taps, full.taps)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_equal_each_sequence_alone(family, targets) -> None:
    target, reference = load(getattr(targets, family), TAPS), reference_of(getattr(targets, family))
    rows = [token_ids(30, seed) for seed in range(4)]
    read, cache = [0] * 4, target.new_cache(60, batch=4)
    # Ragged prefill, ragged blocks, single tokens, and a block again: what padding wrote must never be seen.
    for step, counts in enumerate(([5, 9, 1, 7], [3, 1, 4, 2], [1, 1, 1, 1], [2, 6, 3, 1], [1, 1, 1, 1])):
        width = max(counts)
        block = torch.full((4, width), 7)
        for row, count in enumerate(counts):
            block[row, :count] = torch.tensor(rows[row][read[row] : read[row] + count])
        mode = "all" if step % 2 else "last"
        output = target.forward(block, cache, mode, counts)
        for row, count in enumerate(counts):
            logits, taps = _reference(reference, rows[row][: read[row] + count])
            if mode == "all":
                _close(output.logits[row, :count], logits[read[row] :])
            else:
                _close(output.logits[row, 0], logits[-1])
            _close(output.taps[row, :count], taps[read[row] :])
            read[row] += count
        assert cache.lengths == read
    cache.keep([3, 0])
    output = target.forward(torch.tensor([[rows[3][read[3]]], [rows[0][read[0]]]]), cache)
    for place, row in enumerate((3, 0)):
        _close(output.logits[place, 0], _reference(reference, rows[row][: read[row] + 1])[0][-1])
    cache.keep([1])
    output = target.forward(torch.tensor([rows[0][read[0] + 1 : read[0] + 4]]), cache)
    _close(output.logits[0], _reference(reference, rows[0][: read[0] + 4])[0][-3:])


@pytest.mark.parametrize("removed", [0, 1, 5, 6])
def test_d11_after_rollback_the_next_logits_are_those_of_a_fresh_prefill(pair, removed) -> None:
    target, reference = pair
    ids, wrong = token_ids(12), token_ids(6, seed=9)
    cache = target.new_cache(40)
    target.forward(torch.tensor([ids]), cache)
    target.forward(torch.tensor([wrong]), cache)
    cache.rollback(removed)
    kept = ids + wrong[: 6 - removed]
    assert cache.lengths == [len(kept)]
    more = token_ids(4, seed=5)
    output = target.forward(torch.tensor([more]), cache)
    logits, taps = _reference(reference, kept + more)
    _close(output.logits[0], logits[len(kept) :])
    _close(output.taps[0], taps[len(kept) :])


def test_d11_everything_may_be_rolled_back_but_no_more(pair) -> None:
    target, reference = pair
    ids = token_ids(6)
    cache = target.new_cache(20)
    target.forward(torch.tensor([token_ids(6, seed=3)]), cache)
    for count in (7, -1):
        with pytest.raises(DraftpoolError, match=f"cannot remove {count} of 6 tokens"):
            cache.rollback(count)
    cache.rollback(6)
    _close(target.forward(torch.tensor([ids]), cache).logits[0], _reference(reference, ids)[0])


def test_a_full_cache_is_one_clear_error(pair) -> None:
    target, _ = pair
    cache = target.new_cache(10)
    target.forward(torch.tensor([token_ids(8)]), cache)
    with pytest.raises(DraftpoolError, match="sequence of 11 tokens is longer than the cache of 10"):
        target.forward(torch.tensor([token_ids(3)]), cache)
    # The refused block left nothing behind.
    assert cache.lengths == [8]
    target.forward(torch.tensor([token_ids(2)]), cache)


def test_a_cache_never_exceeds_the_target_s_positions(pair) -> None:
    target, _ = pair
    assert target.new_cache(MAX_POSITIONS + 50).max_length == MAX_POSITIONS


def test_the_transformers_backend_runs_one_sequence(targets) -> None:
    target = TransformersTarget(reference_of(targets.llama), TAPS)
    assert not target.supports_batches
    with pytest.raises(ValueError, match="one sequence at a time"):
        target.new_cache(10, batch=2)


def test_recurrent_layers_are_refused() -> None:
    model = SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention", "linear_attention"]))
    with pytest.raises(DraftpoolError, match="linear_attention cannot take back a rejected token"):
        TransformersTarget(model, TAPS)


def test_rollback_behind_a_sliding_window(tmp_path) -> None:
    folder = save_target(tmp_path / "mistral", "mistral")
    with pytest.warns(UserWarning, match="does not run this target") as caught:
        target = load(folder, TAPS)
    assert len([entry for entry in caught if "fast backend" in str(entry.message)]) == 1
    assert isinstance(target, TransformersTarget)
    reference, ids = reference_of(folder), token_ids(20)
    cache = target.new_cache(60)
    target.forward(torch.tensor([ids]), cache)
    for wrong in range(3):
        target.forward(torch.tensor([token_ids(5, seed=wrong)]), cache)
        cache.rollback(5)
    more = token_ids(4, seed=5)
    output = target.forward(torch.tensor([more]), cache)
    _close(output.logits[0], _reference(reference, ids + more)[0][len(ids) :])
    cache.rollback(14)
    output = target.forward(torch.tensor([more]), cache)
    _close(output.logits[0], _reference(reference, ids[:10] + more)[0][10:])


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mistral", {"sliding_window": None}, "model family `mistral`"),
        ("llama", {"hidden_act": "gelu"}, "activation `gelu`"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "rotary embedding of type `linear`",
        ),
        (
            "qwen3",
            {
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "use_sliding_window": True,
                "sliding_window": 4,
            },
            "sliding-window attention",
        ),
    ],
)
def test_what_the_fast_path_does_not_run_falls_back_with_one_warning(
    family, changes, reason, tmp_path
) -> None:
    folder = save_target(tmp_path / "model", family, **changes)
    with pytest.warns(UserWarning, match=reason) as caught:
        target = load(folder, TAPS)
    assert sum("fast backend" in str(entry.message) for entry in caught) == 1
    assert isinstance(target, TransformersTarget)
    ids = token_ids(12)
    output = target.forward(torch.tensor([ids]), target.new_cache(12))
    _close(output.logits[0], _reference(reference_of(folder), ids)[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
)
def test_biases_and_rotary_bases_of_llama_are_respected(changes, tmp_path) -> None:
    folder = save_target(tmp_path / "model", "llama", **changes)
    target, ids = load(folder, TAPS), token_ids(30)
    assert isinstance(target, FastTarget)
    _close(
        target.forward(torch.tensor([ids]), target.new_cache(30)).logits[0],
        _reference(reference_of(folder), ids)[0],
    )


def test_supported_families_load_without_a_warning(targets) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fast backend.*")
        for family in FAMILIES:
            assert isinstance(load(getattr(targets, family)), FastTarget)


def test_default_taps_of_36_layers_are_those_of_the_paper() -> None:
    assert default_taps(36) == [1, 9, 17, 25, 33]
    assert default_taps(30) == [1, 8, 14, 20, 27]


@pytest.mark.parametrize("n_layers", range(1, 60))
def test_default_taps_fit_every_depth(n_layers) -> None:
    taps = default_taps(n_layers)
    assert taps == sorted(set(taps)) and len(taps) == min(5, max(1, n_layers - 1))
    assert taps[0] >= 0 and taps[-1] < max(1, n_layers - 1)


@pytest.mark.parametrize("taps", [[0, LAYERS - 1], [-1, 1], [2, 1], [1, 1], [7]])
def test_taps_that_do_not_fit_are_refused_with_the_range(taps, targets) -> None:
    with pytest.raises(DraftpoolError, match=f"{LAYERS} layers.*from 0 to {LAYERS - 2}"):
        load(targets.llama, taps)
    assert check_taps(None, LAYERS) == default_taps(LAYERS)


# --- fetching -------------------------------------------------------------------------------------------


def _cfg(source: str, folder) -> dict:
    if source == "path":
        return {"source": "path", "path": str(folder), "taps": None}
    return {"source": "hub", "model_id": str(folder), "revision": None, "taps": None}


@pytest.mark.parametrize("source", ["path", "hub"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fetched_target_is_the_same_model(family, source, targets, tmp_path) -> None:
    folder = getattr(targets, family)
    fetch_target(_cfg(source, folder), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "resolved.yaml", "provenance.json"} <= names
    assert len(read_json(tmp_path / "out" / "provenance.json")["chat_template"]) == 16
    ids = torch.tensor([token_ids(9)])
    logits = [load(path).forward(ids, load(path).new_cache(9)).logits for path in (folder, tmp_path / "out")]
    assert torch.equal(*logits)
    message = [{"role": "user", "content": "the quick brown fox"}]
    loaded = load_tokenizer(tmp_path / "out")
    assert prompt_ids(loaded, message) == prompt_ids(load_tokenizer(folder), message)
    assert loaded.decode(prompt_ids(loaded, message)).split()[-2:] == ["<turn>", "assistant"]
    assert end_ids(loaded, load(folder).hf_config) == [2]


def test_chat_options_are_fixed_in_the_template(targets, tmp_path) -> None:
    shutil.copytree(targets.llama, tmp_path / "in")
    tokenizer = load_tokenizer(tmp_path / "in")
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking is false %} quick"
        "{% else %} slow{% endif %} {{ depth }}"
    )
    tokenizer.save_pretrained(tmp_path / "in")
    options = {"enable_thinking": False, "depth": "a 'b' \"c\""}
    fetch_target(_cfg("path", tmp_path / "in") | {"chat_options": options}, tmp_path / "out")
    say = [{"role": "user", "content": "hello"}]

    def shown(folder):
        return load_tokenizer(folder).apply_chat_template(say, tokenize=False)

    assert shown(tmp_path / "in") == "hello slow "
    assert shown(tmp_path / "out") == "hello quick a 'b' \"c\""
    with pytest.raises(DraftpoolError, match="does not read `enable_thinkin`"):
        fetch_target(
            _cfg("path", tmp_path / "in") | {"chat_options": {"enable_thinkin": False}}, tmp_path / "none"
        )
    assert not (tmp_path / "none").exists()


def test_prompts_without_a_chat_template_are_joined(targets) -> None:
    plain = load_tokenizer(targets.llama)
    plain.chat_template = None
    messages = [{"role": "system", "content": "the quick"}, {"role": "user", "content": "brown fox"}]
    assert prompt_ids(plain, messages) == plain("the quick brown fox")["input_ids"]


def test_end_ids_join_configuration_and_tokenizer(targets) -> None:
    config = load(targets.llama).hf_config
    words = load_tokenizer(targets.llama)
    config.eos_token_id = [7, 4]
    assert end_ids(words, config) == [2, 4, 7]
    config.eos_token_id = None
    assert end_ids(words, config) == [2]


@pytest.mark.parametrize("source", ["path", "hub"])
def test_a_missing_folder_is_named(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DraftpoolError, match="nowhere") as caught:
        fetch_target(_cfg(source, tmp_path / "nowhere"), tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_d17_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path) -> None:
    causal_model("llama", vocab_size=60).save_pretrained(tmp_path / "in")
    tokenizer().save_pretrained(tmp_path / "in")
    with pytest.raises(DraftpoolError, match=f"tokenizer has {len(tokenizer())} ids, the model only 60"):
        fetch_target(_cfg("path", tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_d17_a_padded_vocabulary_is_accepted(targets, tmp_path) -> None:
    assert len(load_tokenizer(targets.llama)) < load(targets.llama).embedding.shape[0]
    fetch_target(_cfg("path", targets.llama), tmp_path / "out")


def _break(folder, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "pickle":
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    elif how == "cut short":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "no tokenizer":
        for path in folder.glob("token*"):
            path.unlink()
    else:
        (folder / "config.json").write_text("{")


@pytest.mark.parametrize("how", ["pickle", "cut short", "no tokenizer", "no config"])
def test_damaged_folders_are_refused_in_one_line(how, targets, tmp_path) -> None:
    shutil.copytree(targets.llama, tmp_path / "in")
    _break(tmp_path / "in", how)
    with pytest.raises(DraftpoolError) as caught:
        fetch_target(_cfg("path", tmp_path / "in"), tmp_path / "out")
    assert str(tmp_path / "in") in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(DraftpoolError) as caught:
        load_tokenizer(tmp_path / "in") if how == "no tokenizer" else load_target(
            tmp_path / "in", None, CPU, torch.float32
        )
    assert "delete the folder and run snakemake again" in str(caught.value) and "\n" not in str(caught.value)


def _same_logits(folder: Path, other: Path) -> None:
    ids = torch.tensor([token_ids(7)])
    made = [load(path).forward(ids, load(path).new_cache(8)).logits for path in (folder, other)]
    assert torch.equal(*made)


def test_shards_are_read_like_one_file(targets, tmp_path) -> None:
    shutil.copytree(targets.qwen3, tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    reference_of(targets.qwen3).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    _same_logits(targets.qwen3, tmp_path / "sharded")


def test_a_missing_tensor_is_named(targets, tmp_path) -> None:
    shutil.copytree(targets.llama, tmp_path / "in")
    weights = load_file(tmp_path / "in" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DraftpoolError, match=r"no tensor 'model.layers.1.mlp.up_proj.weight'.* -> delete"):
        load(tmp_path / "in")


def test_the_backend_can_be_chosen(targets) -> None:
    slow = load_target(targets.llama, None, CPU, torch.float32, "transformers")
    assert isinstance(slow, TransformersTarget) and not slow.supports_batches
    ids = torch.tensor([token_ids(9)])
    fast = load(targets.llama)
    ours, theirs = (model.forward(ids, model.new_cache(9)) for model in (fast, slow))
    assert (ours.logits - theirs.logits).abs().max() <= 1e-4
    assert (ours.taps - theirs.taps).abs().max() <= 1e-4


def test_families_with_other_tensor_names_give_their_weights_too(tmp_path) -> None:
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    weights = load_weights(tmp_path, torch.float32)
    assert torch.equal(weights.embedding(), model.transformer.wte.weight)
    assert torch.equal(weights.head(weights.embedding()), model.lm_head.weight)
    assert "model.embed_tokens.weight" not in weights and len(weights) == len(list(weights))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fetched_target_is_read_without_transformers(family, targets, tmp_path) -> None:
    fetch_target(_cfg("path", getattr(targets, family)), tmp_path / "out")
    described, known = read_config(tmp_path / "out"), AutoConfig.from_pretrained(tmp_path / "out")
    for name, value in vars(described).items():
        if name not in ("dtype", "transformers_version", "_name_or_path"):
            assert json.loads(json.dumps(getattr(known, name))) == value, name
    assert described_mask_token(tmp_path / "out") == mask_token(load_tokenizer(tmp_path / "out"))
    assert described_mask_token(getattr(targets, family)) is None
    code = (
        "import sys, torch; from pathlib import Path; from draftpool.targets.load import load_target;"
        f"made = load_target(Path({str(tmp_path / 'out')!r}), [0], torch.device('cpu'), torch.float32);"
        "assert 'transformers' not in sys.modules; print(made.hf_config.vocab_size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == known.vocab_size
    _same_logits(tmp_path / "out", getattr(targets, family))


def test_the_general_tokenizer_class_reads_what_the_automatic_one_reads(targets) -> None:
    ours, theirs = load_tokenizer(targets.llama), AutoTokenizer.from_pretrained(targets.llama)
    assert read_json(targets.llama / "tokenizer_config.json")["tokenizer_class"] in GENERAL_TOKENIZERS
    chat = [{"role": "user", "content": "the cat sat"}]
    assert prompt_ids(ours, chat) == prompt_ids(theirs, chat)
    assert ours.eos_token_id == theirs.eos_token_id and len(ours) == len(theirs)
