"""Published drafters: read from checkpoints that these tests write in the layouts of others, and exported."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripted import fresh_draft
from tiny import (
    LINES,
    SPECIALS,
    TAPS,
    VOCABULARY,
    causal_model,
    load,
    random_drafter,
    reference_of,
    save_target,
    token_ids,
    tokenizer,
)

from draftpool import cli
from draftpool.artefacts import read_json
from draftpool.drafters.drafter_folder import save_drafter
from draftpool.drafters.load import load_drafter
from draftpool.drafters.published import export_drafter, fetch_drafter
from draftpool.errors import DraftpoolError

K = 3
DEEP = 8  # layers of the EAGLE-3 heads' target
DEEP_TAPS = [1, DEEP // 2 - 1, DEEP - 4]
DRAFT_VOCABULARY = 50


# --- checkpoints in the layouts of others ---------------------------------------------------------------


def _random(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Loud weights, norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[name] = noise * 0.25 if len(shape) > 1 else 1.0 + noise * 0.2
    return made


def _layer_shapes(settings: dict, prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    wide, narrow = settings["num_attention_heads"] * size, settings["num_key_value_heads"] * size
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (wide, width),
        f"{prefix}self_attn.k_proj.weight": (narrow, width),
        f"{prefix}self_attn.v_proj.weight": (narrow, width),
        f"{prefix}self_attn.o_proj.weight": (hidden, wide),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }


def _save(folder: Path, settings: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def zlab(folder: Path, hidden: int, **changes) -> Path:
    """A block drafter as z-lab publishes them, of heads and widths that are not the target's."""
    settings = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 777.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": VOCABULARY,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 119, "target_layer_ids": TAPS},
    } | changes
    shapes = {
        "fc.weight": (hidden, len(TAPS) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(settings["num_hidden_layers"]):
        prefix = f"layers.{index}."
        shapes |= _layer_shapes(settings, prefix, hidden)
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (settings["head_dim"],) for name in "qk"}
    return _save(folder, settings, _random(shapes))


def eagle3(folder: Path, hidden: int, **changes) -> Path:
    """A head as SafeAILab publishes them, its draft ids in no order."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 333.0,
        "max_position_embeddings": 64,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT_VOCABULARY,
    } | changes
    shapes = _layer_shapes(settings, "midlayer.", 2 * hidden)
    shapes |= {
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden),
        "lm_head.weight": (settings["draft_vocab_size"], hidden),
    }
    tensors = _random({name: shapes[name] for name in sorted(shapes)})
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))
    ids = ids[: settings["draft_vocab_size"]]
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return _save(folder, settings, tensors)


def _change(folder: Path, settings: dict | None = None, tensors: dict | None = None, drop=()) -> Path:
    """Write a checkpoint again with other settings (None: taken out) and tensors."""
    config = read_json(folder / "config.json") | (settings or {})
    state = load_file(folder / "model.safetensors") | (tensors or {})
    kept = {name: value for name, value in config.items() if value is not None}
    return _save(folder, kept, {name: state[name] for name in state if name not in drop})


def _cfg(layout: str, folder: Path, **changes) -> dict:
    cfg = {"layout": layout, "path": str(folder), "model_id": None, "revision": None, "draft_tokens": K}
    return cfg | {"taps": DEEP_TAPS if layout == "eagle3" else TAPS, "content": "ab"} | changes


def _refused(cfg: dict, target: Path, out: Path, *words: str) -> None:
    with pytest.raises(DraftpoolError) as caught:
        fetch_drafter(cfg, target, out)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert not list(out.parent.glob(f"*{out.name}*"))


# --- the formulas, once more ----------------------------------------------------------------------------


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(x: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [n, heads, size] by complex numbers."""
    half = x.shape[-1] // 2
    angles = places[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def _attended(queries, keys, values) -> torch.Tensor:
    """Every query [n, heads, size] sees all keys [m, kv heads, size]."""
    heads, shared = queries.shape[1], keys.shape[1]
    rows = []
    for query in queries:
        mixed = []
        for head in range(heads):
            of = head * shared // heads
            scores = keys[:, of] @ query[head] / query.shape[-1] ** 0.5
            mixed.append(scores.softmax(0) @ values[:, of])
        rows.append(torch.cat(mixed))
    return torch.stack(rows)


class Naive:
    """Settings and tensors of a checkpoint, in float64."""

    def __init__(self, folder: Path):
        self.settings = read_json(folder / "config.json")
        self.state = load_file(folder / "model.safetensors")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.state[f"{name}.weight"].double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return _norm(x, self[name], self.settings["rms_norm_eps"])

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ self[name].T).view(len(x), -1, self.settings["head_dim"])

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate = x @ self[f"{prefix}gate_proj"].T
        return (gate * gate.sigmoid() * (x @ self[f"{prefix}up_proj"].T)) @ self[f"{prefix}down_proj"].T

    def dflash(self, target, taps: torch.Tensor, anchor: int) -> torch.Tensor:
        """DFlash (arXiv 2602.06036): log-probabilities [B - 1, vocabulary] after taps [n, taps x hidden]."""
        settings, n = self.settings, len(taps)
        size = settings["block_size"]
        places = torch.arange(n + size, dtype=torch.float64)
        fused = self.norm(taps.double() @ self["fc"].T, "hidden_norm")
        x = target.embedding.double()[[anchor] + [settings["dflash_config"]["mask_token_id"]] * (size - 1)]
        for index in range(settings["num_hidden_layers"]):
            layer = f"layers.{index}."
            inner = self.norm(x, f"{layer}input_layernorm")
            both = torch.cat((fused, inner))
            queries = self.norm(self.heads(inner, f"{layer}self_attn.q_proj"), f"{layer}self_attn.q_norm")
            keys = self.norm(self.heads(both, f"{layer}self_attn.k_proj"), f"{layer}self_attn.k_norm")
            values = self.heads(both, f"{layer}self_attn.v_proj")
            theta = settings["rope_theta"]
            mixed = _attended(_turned(queries, places[n:], theta), _turned(keys, places, theta), values)
            x = x + mixed @ self[f"{layer}self_attn.o_proj"].T
            x = x + self.mlp(self.norm(x, f"{layer}post_attention_layernorm"), f"{layer}mlp.")
        return (self.norm(x, "norm")[1:] @ target.head_weight.double().T).log_softmax(-1)

    def eagle3(self, target, taps: torch.Tensor, tokens: list[int], k: int) -> tuple[list[int], torch.Tensor]:
        """EAGLE-3 (arXiv 2503.01840): ids drafted behind tokens [n + 1] and log-probabilities [k, draft ids].

        Everything is computed again for every token; entry i pairs feature i with token i + 1.
        """
        theta = self.settings["rope_theta"]
        features, following = list(taps.double() @ self["fc"].T), list(tokens[1:])
        rows = []
        for _ in range(k):
            embedded = self.norm(target.embedding.double()[following], "midlayer.input_layernorm")
            hidden = self.norm(torch.stack(features), "midlayer.hidden_norm")
            x = torch.cat((embedded, hidden), dim=-1)
            places = torch.arange(len(x), dtype=torch.float64)
            queries = _turned(self.heads(x[-1:], "midlayer.self_attn.q_proj"), places[-1:], theta)
            keys = _turned(self.heads(x, "midlayer.self_attn.k_proj"), places, theta)
            mixed = _attended(queries, keys, self.heads(x, "midlayer.self_attn.v_proj"))[0]
            made = features[-1] + self["midlayer.self_attn.o_proj"] @ mixed
            made = made + self.mlp(self.norm(made, "midlayer.post_attention_layernorm"), "midlayer.mlp.")
            rows.append((self["lm_head"] @ self.norm(made, "norm")).log_softmax(-1))
            chosen = int(rows[-1].argmax())
            following.append(chosen + int(self.state["d2t"][chosen]))
            features.append(made)
        return following[-k:], torch.stack(rows)


def _read(drafter, target, tokens: list[int], pieces=(7, 1, 3)) -> None:
    """Feed all tokens but the last in pieces."""
    ids = torch.tensor(tokens[:-1])
    taps = target.forward(ids[None], target.new_cache(len(ids)), "none").taps[0]
    drafter.reset(len(ids))
    drafter.prefill(ids[: pieces[0]], taps[: pieces[0]])
    place = pieces[0]
    for piece in pieces[1:]:
        drafter.catch_up(ids[place : place + piece], taps[place : place + piece])
        place += piece
    drafter.catch_up(ids[place:], taps[place:])


# --- block drafters -------------------------------------------------------------------------------------


@pytest.fixture(params=["llama", "qwen3"])
def family(request) -> str:
    return request.param


def _hidden(family: str) -> int:
    return 48 if family == "llama" else 32


def test_a_dflash_checkpoint_drafts_as_the_formula_says(family, targets, tmp_path) -> None:
    source = zlab(tmp_path / "source", _hidden(family))
    fetch_drafter(_cfg("dflash", source), getattr(targets, family), tmp_path / "out")
    target, tokens = load(getattr(targets, family), TAPS), token_ids(14)
    drafter = load_drafter("d", tmp_path / "out", target)
    assert drafter.k == 4 and drafter.kind == "block" and drafter.fits(123) and not drafter.fits(124)
    draft = fresh_draft(drafter, target, tokens)
    ids = torch.tensor([tokens[:-1]])
    taps = target.forward(ids, target.new_cache(20), "none").taps[0]
    naive = Naive(source).dflash(target, taps, tokens[-1])
    torch.testing.assert_close(draft.log_q.double(), naive, atol=5e-4, rtol=1e-4)
    assert torch.equal(draft.ids, naive.argmax(-1)) and not torch.allclose(naive[0], naive[1], atol=1e-2)
    assert draft.vocabulary.tolist() == list(range(VOCABULARY))
    assert {"resolved.yaml", "provenance.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_settings_in_either_place_and_shards_read_the_same(targets, tmp_path) -> None:
    source = zlab(tmp_path / "source", 48)
    fetch_drafter(_cfg("dflash", source), targets.llama, tmp_path / "out")
    moved = {"mask_token_id": 119, "target_layer_ids": TAPS, "dflash_config": {"block_size": 5}}
    rope = {"rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}, "rope_theta": None}
    _change(source, moved | rope | {"block_size": None, "layer_types": ["full_attention"] * 2})
    state = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    shards = [sorted(state)[:9], sorted(state)[9:]]
    weight_map = {}
    for number, part in enumerate(shards):
        save_file({name: state[name] for name in part}, source / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    fetch_drafter(_cfg("dflash", source), targets.llama, tmp_path / "again")
    assert read_json(tmp_path / "out" / "config.json") == read_json(tmp_path / "again" / "config.json")
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    (source / "part-1.safetensors").unlink()
    _refused(_cfg("dflash", source), targets.llama, tmp_path / "none", "part-1.safetensors is missing")


def test_default_taps_of_the_study_are_compared(targets, tmp_path) -> None:
    source = zlab(tmp_path / "source", 48)
    fetch_drafter(_cfg("dflash", source, taps=None), targets.llama, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json")["taps"] == TAPS
    cfg = _cfg("dflash", source, taps=[0, 2])
    _refused(cfg, targets.llama, tmp_path / "none", "[0, 1, 2]", "[0, 2]", "set `target.taps` to [0, 1, 2]")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": 32}, ("hidden_size is 32, the target's is 48",)),
        ({"vocab_size": 99}, ("vocab_size is 99, the target's is 120",)),
        ({"num_target_layers": 36}, ("num_target_layers is 36, the target's is 4",)),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]}}, ("[1, 3]", "4 layers")),
        ({"dflash_config": {"mask_token_id": 120, "target_layer_ids": TAPS}}, ("mask_token_id", "120")),
        ({"dflash_config": {"mask_token_id": 3}}, ("no `target_layer_ids`",)),
        ({"dflash_config": {"target_layer_ids": TAPS}}, ("no `mask_token_id`",)),
        ({"dflash_config": [1]}, ("`dflash_config` is [1]",)),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": "all"}},
            ("`target_layer_ids` is 'all'",),
        ),
        ({"block_size": None}, ("no `block_size`",)),
        ({"block_size": 1}, ("`block_size` is 1",)),
        ({"num_hidden_layers": "two"}, ("`num_hidden_layers` is 'two'",)),
        ({"rms_norm_eps": -1}, ("`rms_norm_eps` is -1",)),
        ({"num_key_value_heads": 3}, ("4 heads of size 10 cannot share 3",)),
        ({"hidden_act": "gelu"}, ("`gelu`",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ("`yarn`",)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("sliding-window",)),
        ({"use_sliding_window": True, "max_window_layers": 1}, ("sliding-window",)),
        ({"is_causal": True}, ("is_causal",)),
        ({"output_multiplier": 0.5}, ("`output_multiplier` 0.5",)),
        ({"final_logit_softcapping": 20.0}, ("`final_logit_softcapping` 20.0",)),
        ({"head_dim": 12}, ("tensor `layers.0.self_attn.q_proj.weight` is [40, 48]", "[48, 48]")),
        ({"num_hidden_layers": 1}, ("a further tensor `layers.1.input_layernorm.weight`",)),
        ({"num_hidden_layers": 3}, ("no tensor `layers.2.input_layernorm.weight`",)),
    ],
)
def test_other_dflash_settings_are_refused_by_name(settings, words, targets, tmp_path) -> None:
    source = _change(zlab(tmp_path / "source", 48), settings)
    _refused(_cfg("dflash", source), targets.llama, tmp_path / "out", "source", *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": ("norm.weight",)}, "no tensor `norm.weight`"),
        (
            {"tensors": {"layers.0.attention_conv.base_kernel": torch.ones(2)}},
            "`layers.0.attention_conv.base_kernel`",
        ),
        (
            {"tensors": {"fc.weight": torch.ones(48, 48)}},
            "tensor `fc.weight` is [48, 48], config.json asks for",
        ),
        (
            {"tensors": {"norm.weight": torch.ones(48, dtype=torch.int32)}},
            "`norm.weight` is of type torch.int32",
        ),
    ],
)
def test_other_dflash_tensors_are_refused_by_name(change, words, targets, tmp_path) -> None:
    source = _change(zlab(tmp_path / "source", 48), **change)
    _refused(_cfg("dflash", source), targets.llama, tmp_path / "out", words)


def test_a_dflash_output_bias_must_be_zero(targets, tmp_path) -> None:
    source = zlab(tmp_path / "source", 48)
    biases = {
        f"layers.{i}.self_attn.{n}_proj.bias": torch.ones(s)
        for i in (0, 1)
        for n, s in (("q", 40), ("k", 20), ("v", 20))
    }
    zeros = {f"layers.{i}.self_attn.o_proj.bias": torch.zeros(48) for i in (0, 1)}
    _change(source, {"attention_bias": True}, biases | zeros)
    fetch_drafter(_cfg("dflash", source), targets.llama, tmp_path / "out")
    assert load_drafter("d", tmp_path / "out", load(targets.llama, TAPS)).model.config.attention_bias
    _change(source, tensors={"layers.1.self_attn.o_proj.bias": torch.ones(48)})
    _refused(
        _cfg("dflash", source),
        targets.llama,
        tmp_path / "none",
        "`layers.1.self_attn.o_proj.bias` is not zero",
    )


# --- files ----------------------------------------------------------------------------------------------


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "drafter.pt", "drafter.pth"])
@pytest.mark.parametrize("layout", ["dflash", "eagle3", "causal_lm"])
def test_a_pickle_is_refused_and_never_read(layout, name, targets, tmp_path) -> None:
    source = zlab(tmp_path / "source", 48)
    (source / "model.safetensors").unlink()
    (source / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    cfg = _cfg(layout, source, taps=TAPS)
    _refused(cfg, targets.llama, tmp_path / "out", name, "a pickle", "model.safetensors")
    index = {"weight_map": {"norm.weight": name}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(cfg, targets.llama, tmp_path / "out", "model.safetensors.index.json")
    assert not (tmp_path / "sprung").exists()
    # The trap works: this is what reading it would have done.
    pickle.loads((source / name).read_bytes()).close()
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("layout", ["dflash", "eagle3", "causal_lm"])
@pytest.mark.parametrize("how", ["cut", "no weights", "no config", "torn config", "list", "gone"])
def test_missing_and_damaged_files_are_told_in_one_line(layout, how, targets, tmp_path) -> None:
    source = tmp_path / "source"
    if layout == "causal_lm":
        shutil.copytree(targets.llama, source)
    else:
        zlab(source, 48)
    words = {"gone": "no such folder", "no weights": "holds no model.safetensors"}.get(how, "source")
    if how == "cut":
        (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:2000])
    elif how == "no weights":
        (source / "model.safetensors").unlink()
    elif how == "no config":
        (source / "config.json").unlink()
    elif how == "gone":
        shutil.rmtree(source)
    else:
        (source / "config.json").write_text("{" if how == "torn config" else "[]")
    _refused(_cfg(layout, source, taps=TAPS), targets.llama, tmp_path / "out", words)


# --- the Hub --------------------------------------------------------------------------------------------


def test_a_repository_name_may_be_a_folder(targets, tmp_path) -> None:
    source = zlab(tmp_path / "source", 48)
    cfg = _cfg("dflash", source, path=None, model_id=str(source))
    fetch_drafter(cfg, targets.llama, tmp_path / "out")
    assert load_drafter("d", tmp_path / "out", load(targets.llama, TAPS)).k == 4


@pytest.mark.parametrize("layout", ["dflash", "causal_lm"])
def test_a_repository_is_downloaded_at_its_revision_without_code(
    layout, targets, tmp_path, monkeypatch
) -> None:
    source = zlab(tmp_path / "source", 48) if layout == "dflash" else targets.llama
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    cfg = _cfg(layout, source, path=None, model_id="some/drafter", revision="abc")
    fetch_drafter(cfg, targets.llama, tmp_path / "out")
    assert asked["name"] == "some/drafter" and asked["revision"] == "abc"
    assert not {"*.py", "*.bin", "*.pt", "*.pth", "*"} & set(asked["allow_patterns"])
    assert load_drafter("d", tmp_path / "out", load(targets.llama, TAPS)).k


@pytest.mark.parametrize("error", [OSError("no\nroute"), ConnectionError(), ValueError("bad name")])
def test_a_failed_download_is_told_in_one_line(error, targets, tmp_path, monkeypatch) -> None:
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    cfg = _cfg("eagle3", tmp_path, path=None, model_id="some/drafter", taps=TAPS)
    _refused(cfg, targets.llama, tmp_path / "out", "some/drafter", "cannot be downloaded", "network")


def test_a_name_that_is_nowhere_is_told(targets, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cfg = _cfg("dflash", tmp_path, path=None, model_id=str(tmp_path / "nowhere"))
    _refused(cfg, targets.llama, tmp_path / "out", "nowhere", "cannot be downloaded")


# --- EAGLE-3 --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    """A Llama that is deep enough for the three layers of EAGLE-3."""
    return save_target(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=DEEP)


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_an_eagle3_checkpoint_drafts_as_the_formula_says(draft_tokens, deep, tmp_path) -> None:
    source = eagle3(tmp_path / "source", 48)
    fetch_drafter(_cfg("eagle3", source, draft_tokens=draft_tokens), deep, tmp_path / "out")
    target, tokens = load(deep, DEEP_TAPS), token_ids(17, seed=2)
    drafter = load_drafter("e", tmp_path / "out", target)
    assert drafter.kind == "eagle" and drafter.k == draft_tokens
    assert drafter.fits(64 - draft_tokens) and not drafter.fits(65 - draft_tokens)
    ids = torch.tensor([tokens[:-1]])
    taps = target.forward(ids, target.new_cache(20), "none").taps[0]
    wanted, naive = Naive(source).eagle3(target, taps, tokens, draft_tokens)
    _read(drafter, target, tokens)
    draft = drafter.draft(tokens[-1])
    assert draft.ids.tolist() == wanted
    vocabulary = torch.arange(DRAFT_VOCABULARY) + Naive(source).state["d2t"]
    order = vocabulary.argsort()
    assert draft.vocabulary.tolist() == vocabulary[order].tolist() != vocabulary.tolist()
    torch.testing.assert_close(draft.log_q.double(), naive[:, order], atol=5e-4, rtol=1e-4)


def test_the_taps_are_what_goes_into_the_layers_of_safeailab(deep, tmp_path) -> None:
    """Their feature of layer l is the hidden state in front of it (hidden_states[l] of transformers)."""
    target, reference, tokens = load(deep, DEEP_TAPS), reference_of(deep), torch.tensor([token_ids(9)])
    with torch.no_grad():
        states = reference(tokens, output_hidden_states=True).hidden_states
    theirs = torch.cat([states[layer][0] for layer in (2, DEEP // 2, DEEP - 3)], dim=-1)
    ours = target.forward(tokens, target.new_cache(9), "none").taps[0]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    source = eagle3(tmp_path / "source", 48)
    fetch_drafter(_cfg("eagle3", source), deep, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json")["taps"] == DEEP_TAPS


@pytest.mark.parametrize(
    ("settings", "taps"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, [1, 2, 6]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}}, [1, 2, 6]),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, [1, 2, 6]),
        ({"eagle_config": {"use_aux_hidden_state": True}}, DEEP_TAPS),
    ],
)
def test_eagle3_layers_by_output_and_by_input(settings, taps, deep, tmp_path) -> None:
    source = _change(eagle3(tmp_path / "source", 48), settings)
    fetch_drafter(_cfg("eagle3", source, taps=taps), deep, tmp_path / "out")
    _refused(
        _cfg("eagle3", source, taps=[0, 1, 2]), deep, tmp_path / "no", str(taps), "[0, 1, 2]", "target.taps"
    )


def test_an_eagle3_head_over_the_whole_vocabulary_needs_no_maps(deep, tmp_path) -> None:
    source = eagle3(tmp_path / "source", 48, draft_vocab_size=VOCABULARY)
    fetch_drafter(_cfg("eagle3", _change(source, drop=("d2t", "t2d"))), deep, tmp_path / "bare")
    zeros = {
        "d2t": torch.zeros(VOCABULARY, dtype=torch.long),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool),
    }
    fetch_drafter(_cfg("eagle3", _change(source, tensors=zeros)), deep, tmp_path / "zeros")
    states = [load_file(tmp_path / name / "model.safetensors") for name in ("bare", "zeros")]
    assert states[0]["vocabulary"].tolist() == list(range(VOCABULARY))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(states[0]["head"], load_file(source / "model.safetensors")["lm_head.weight"])


def test_biases_of_an_eagle3_head_are_kept(deep, tmp_path) -> None:
    source = eagle3(tmp_path / "source", 48)
    biases = {
        f"midlayer.self_attn.{n}_proj.bias": torch.full((s,), 0.5)
        for n, s in (("q", 24), ("k", 12), ("v", 12))
    }
    fetch_drafter(_cfg("eagle3", _change(source, tensors=biases)), deep, tmp_path / "out")
    model = load_drafter("e", tmp_path / "out", load(deep, DEEP_TAPS)).model
    assert model.config.attention_bias and float(model.layer.v_proj.bias[3]) == 0.5


def test_a_copy_of_the_targets_embedding_is_left_out(deep, tmp_path) -> None:
    embedding = load(deep, DEEP_TAPS).embedding
    source = _change(eagle3(tmp_path / "source", 48), tensors={"embed_tokens.weight": embedding.half()})
    fetch_drafter(_cfg("eagle3", source), deep, tmp_path / "out")
    assert "embedding" not in load_file(tmp_path / "out" / "model.safetensors")
    _change(source, tensors={"embed_tokens.weight": embedding.flip(0).contiguous()})
    _refused(
        _cfg("eagle3", source), deep, tmp_path / "none", "`embed_tokens.weight` is not the target's embedding"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": 64}, ("hidden_size is 64, the target's is 48",)),
        ({"target_hidden_size": 96}, ("target_hidden_size is 96, the target's is 48",)),
        ({"vocab_size": 151936}, ("vocab_size is 151936, the target's is 120",)),
        ({"num_hidden_layers": 2}, ("2 layers",)),
        ({"norm_before_residual": True}, ("`norm_before_residual`",)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ("one layer of the target",)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 28, 40]}}, ("[1, 28, 40]", "8 layers")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("`linear`",)),
        ({"max_position_embeddings": None}, ("no `max_position_embeddings`",)),
        ({"draft_vocab_size": 60}, ("tensor `lm_head.weight` is [50, 48]", "[60, 48]")),
        ({"intermediate_size": 41}, ("`midlayer.mlp.gate_proj.weight` is [40, 48]", "[41, 48]")),
    ],
)
def test_other_eagle3_settings_are_refused_by_name(settings, words, deep, tmp_path) -> None:
    source = _change(eagle3(tmp_path / "source", 48), settings)
    _refused(_cfg("eagle3", source), deep, tmp_path / "out", "source", *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": ("midlayer.hidden_norm.weight",)}, "no tensor `midlayer.hidden_norm.weight`"),
        ({"drop": ("d2t",)}, "no tensor `d2t`"),
        ({"tensors": {"fc.bias": torch.ones(48)}}, "a further tensor `fc.bias`"),
        ({"tensors": {"d2t": torch.zeros(50, dtype=torch.long)}}, "`t2d` marks other tokens"),
        ({"tensors": {"d2t": torch.full((50,), 71)}}, "`d2t` does not lead to 50 different ids below 120"),
        ({"tensors": {"d2t": -torch.arange(50)}}, "`d2t` does not lead to 50 different ids below 120"),
        ({"tensors": {"d2t": torch.zeros(49, dtype=torch.long)}}, "`d2t` is no list of 50"),
        ({"tensors": {"t2d": torch.ones(99, dtype=torch.bool)}}, "`t2d` marks other tokens"),
    ],
)
def test_other_eagle3_tensors_are_refused_by_name(change, words, deep, tmp_path) -> None:
    source = _change(eagle3(tmp_path / "source", 48), **change)
    _refused(_cfg("eagle3", source), deep, tmp_path / "out", words)


# --- causal language models -----------------------------------------------------------------------------


def _causal(folder: Path, words=None, **changes) -> Path:
    causal_model("llama", seed=5, **({"num_hidden_layers": 2} | changes)).save_pretrained(folder)
    (words or tokenizer()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("rows", [VOCABULARY, 136])
def test_a_causal_model_drafts_what_transformers_says(rows, targets, tmp_path) -> None:
    source = _causal(tmp_path / "source", vocab_size=rows, max_position_embeddings=40)
    fetch_drafter(_cfg("causal_lm", source), targets.qwen3, tmp_path / "out")
    target, tokens, known = load(targets.qwen3, TAPS), token_ids(13), len(tokenizer())
    drafter = load_drafter("c", tmp_path / "out", target)
    assert drafter.k == K and drafter.fits(40 - K) and not drafter.fits(41 - K)
    tokens = [token % known for token in tokens]
    _read(drafter, target, tokens)
    draft = drafter.draft(tokens[-1])
    reference, ids = reference_of(source), list(tokens)
    for slot in range(K):
        with torch.no_grad():
            wanted = reference(torch.tensor([ids])).logits[0, -1, :known].log_softmax(-1)
        torch.testing.assert_close(draft.log_q[slot], wanted, atol=2e-4, rtol=1e-4)
        ids.append(int(wanted.argmax()))
    assert draft.ids.tolist() == ids[-K:]
    config = read_json(tmp_path / "out" / "config.json")
    assert config["common_vocabulary"] == known and config["published"] == str(source)
    assert (tmp_path / "out" / "model" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "provenance.json").exists()


def _words(lines=LINES, eos="<eos>"):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=SPECIALS, show_progress=False))
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": eos}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def test_other_tokenizers_are_refused_by_token(targets, tmp_path) -> None:
    source = _causal(tmp_path / "other", _words(LINES[:3]))
    _refused(
        _cfg("causal_lm", source), targets.llama, tmp_path / "out", "token '", "for the target", "tokenizer"
    )
    source = _causal(tmp_path / "ends", _words(eos="</turn>"))
    _refused(
        _cfg("causal_lm", source),
        targets.llama,
        tmp_path / "out",
        "eos_token_id is 4",
        "and 2 for the target",
    )


def test_a_model_that_cannot_read_all_of_the_targets_ids_is_refused(targets, tmp_path) -> None:
    source = _causal(tmp_path / "source", vocab_size=60)
    largest = len(tokenizer()) - 1
    _refused(_cfg("causal_lm", source), targets.llama, tmp_path / "out", "ids below 60", f"up to {largest}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": ("model.norm.weight",)}, "no tensor `model.norm.weight`"),
        (
            {"tensors": {"model.layers.0.odd.weight": torch.ones(3)}},
            "an unknown tensor `model.layers.0.odd.weight`",
        ),
        ({"tensors": {"model.norm.weight": torch.ones(3)}}, "another shape of tensor `model.norm.weight`"),
        ({"settings": {"model_type": "unheard-of"}}, "unheard-of"),
    ],
)
def test_incomplete_causal_models_are_refused(change, words, targets, tmp_path, capfd) -> None:
    source = _change(_causal(tmp_path / "source"), **change)
    capfd.readouterr()
    _refused(_cfg("causal_lm", source), targets.llama, tmp_path / "out", words)
    assert capfd.readouterr().err == ""


def test_code_of_a_checkpoint_is_not_run(targets, tmp_path) -> None:
    source = _causal(tmp_path / "source")
    (source / "own.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    _change(source, {"model_type": "own", "auto_map": own})
    _refused(_cfg("causal_lm", source), targets.llama, tmp_path / "out", "cannot be loaded")
    assert not (tmp_path / "sprung").exists()


def test_a_model_without_tokenizer_is_refused(targets, tmp_path) -> None:
    causal_model("llama").save_pretrained(tmp_path / "source")
    _refused(
        _cfg("causal_lm", tmp_path / "source"), targets.llama, tmp_path / "out", "cannot be loaded (tokenizer"
    )


# --- export ---------------------------------------------------------------------------------------------


def _ours(folder: Path, target, vocabulary=None, **changes) -> Path:
    model = random_drafter(target, "d", block_size=5, vocabulary=vocabulary).model
    folder.mkdir()
    save_drafter(folder, model.config.model_copy(update=changes), model.state_dict())
    return folder


@pytest.mark.parametrize("attention_bias", [False, True])
def test_an_exported_drafter_read_again_drafts_the_same(attention_bias, tmp_path, capsys) -> None:
    folder = save_target(tmp_path / "target", "qwen3", attention_bias=attention_bias)
    target, tokens = load(folder, TAPS), token_ids(14)
    ours = _ours(tmp_path / "ours", target)
    export_drafter(ours, folder, tmp_path / "theirs")
    assert capsys.readouterr().err == ""
    fetch_drafter(_cfg("dflash", tmp_path / "theirs"), folder, tmp_path / "again")
    assert read_json(ours / "config.json") == read_json(tmp_path / "again" / "config.json")
    drafts = [
        fresh_draft(load_drafter("d", path, target), target, tokens) for path in (ours, tmp_path / "again")
    ]
    assert torch.equal(drafts[0].ids, drafts[1].ids) and torch.equal(drafts[0].log_q, drafts[1].log_q)


def test_an_export_is_what_the_formula_of_zlab_reads(targets, tmp_path) -> None:
    from transformers import Qwen3Config

    target, tokens = load(targets.qwen3, TAPS), token_ids(14)
    ours = _ours(tmp_path / "ours", target)
    export_drafter(ours, targets.qwen3, tmp_path / "theirs")
    taps = target.forward(torch.tensor([tokens[:-1]]), target.new_cache(20), "none").taps[0]
    naive = Naive(tmp_path / "theirs").dflash(target, taps, tokens[-1])
    draft = fresh_draft(load_drafter("d", ours, target), target, tokens)
    torch.testing.assert_close(draft.log_q.double(), naive, atol=5e-4, rtol=1e-4)
    # z-lab's class reads its settings through Qwen3's.
    settings, config = Qwen3Config.from_pretrained(tmp_path / "theirs"), read_json(ours / "config.json")
    assert settings.rope_parameters["rope_theta"] == config["rope_theta"]
    assert settings.layer_types == ["full_attention"] * 2 and settings.head_dim == config["head_dim"]
    assert (
        settings.dflash_config == {"mask_token_id": 0, "target_layer_ids": TAPS} and settings.block_size == 5
    )


def test_a_reduced_vocabulary_is_exported_with_a_warning(targets, tmp_path, capsys) -> None:
    target, tokens = load(targets.qwen3, TAPS), token_ids(14)
    vocabulary = torch.arange(3, 63)
    ours = _ours(tmp_path / "ours", target, vocabulary)
    export_drafter(ours, targets.qwen3, tmp_path / "theirs")
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "all 120 ids" in message and "60" in message
    fetch_drafter(_cfg("dflash", tmp_path / "theirs"), targets.qwen3, tmp_path / "again")
    few, all_ids = (
        fresh_draft(load_drafter("d", path, target), target, tokens) for path in (ours, tmp_path / "again")
    )
    assert all_ids.log_q.shape[1] == VOCABULARY
    among = all_ids.log_q[:, vocabulary].log_softmax(-1)
    torch.testing.assert_close(few.log_q, among, atol=1e-5, rtol=1e-5)


def test_an_export_says_what_it_was_made_of(targets, tmp_path) -> None:
    ours, out = _ours(tmp_path / "ours", load(targets.qwen3, TAPS)), tmp_path / "theirs"
    flags = ["--drafter", str(ours), "--target", str(targets.qwen3), "--out", str(out)]
    assert cli.main(["export_drafter", *flags]) == 0
    made = read_json(out / "provenance.json")
    assert made["stage"] == "export_drafter" and set(made["files"]) == {"config.json", "model.safetensors"}
    assert [entry["path"] for entry in made["inputs"]] == [str(ours), str(targets.qwen3)]


def _no_export(folder: Path, target: Path, out: Path, *words: str) -> None:
    with pytest.raises(DraftpoolError) as caught:
        export_drafter(folder, target, out)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)
    assert not list(out.parent.glob(f"*{out.name}*"))


def test_drafters_that_the_layout_cannot_hold_are_not_exported(targets, deep, tmp_path) -> None:
    out = tmp_path / "theirs"
    plain = _ours(tmp_path / "plain", load(targets.llama, TAPS))
    _no_export(plain, targets.llama, out, "no q/k norms", "plain")
    fetch_drafter(_cfg("eagle3", eagle3(tmp_path / "source", 48)), deep, tmp_path / "head")
    _no_export(tmp_path / "head", deep, out, "kind `eagle`")
    ours = _ours(tmp_path / "ours", load(targets.qwen3, TAPS))
    _no_export(ours, targets.llama, out, "hidden_size 32, the target needs 48")
    state = load_file(ours / "model.safetensors")
    state.pop("norm.weight")
    save_file(state, ours / "model.safetensors")
    _no_export(ours, targets.qwen3, out, "does not fit config.json")
