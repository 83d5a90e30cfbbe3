"""Nothing that was downloaded runs, and no name leads out of results/."""

from __future__ import annotations

import ast
import json
import pickle
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import causal_model, tokenizer

from draftpool import cli
from draftpool.artefacts import append_tables, read_json, read_jsonl, read_table
from draftpool.config.ids import make_id
from draftpool.config.load import merge, resolve
from draftpool.config.plan import Plan
from draftpool.data.archives import list_members, read_member
from draftpool.data.sources import read_candidates
from draftpool.drafters.load import load_drafter
from draftpool.drafters.published import fetch_drafter
from draftpool.errors import DraftpoolError
from draftpool.targets.fetch import fetch_target
from draftpool.targets.load import load_target, load_weights
from draftpool.training.checkpoint import load_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "tests/workflow/config.yaml"
CPU = torch.device("cpu")


# --- pickles ----------------------------------------------------------------------------------------------


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def trap(tmp_path):
    """Write traps into files; at the end none of them was sprung, and all could have been."""
    sprung, files = tmp_path / "sprung", []

    def write(path: Path) -> Path:
        if path.suffix == ".npy":
            np.save(path, np.array([Trap(sprung)], dtype=object), allow_pickle=True)
        elif path.suffix == ".zip":
            torch.save({"weights": Trap(sprung)}, path)
        else:
            path.write_bytes(pickle.dumps(Trap(sprung)))
        files.append(path)
        return path

    yield write
    assert not sprung.exists()
    for path in files:
        if path.suffix == ".npy":
            np.load(path, allow_pickle=True)
        elif path.suffix == ".zip":
            torch.load(path, weights_only=False)
        else:
            pickle.loads(path.read_bytes()).close()
        assert sprung.exists(), f"{path.name} is no trap"
        sprung.unlink()


PICKLED = ["pytorch_model.bin", "model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"]
PICKLED += ["model.joblib", "model.npy", "weights.zip"]


def model_folder(path: Path, trap, name: str, index: bool) -> Path:
    """A model whose weights are a trap, named in an index of shards or simply there."""
    causal_model("llama").save_pretrained(path)
    tokenizer().save_pretrained(path)
    names = list(load_file(path / "model.safetensors"))
    (path / "model.safetensors").unlink()
    trap(path / name)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)})
        (path / "model.safetensors.index.json").write_text(text)
    return path


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("name", PICKLED)
def test_a_target_with_pickled_weights_is_refused(name, index, trap, tmp_path):
    folder = model_folder(tmp_path / "in", trap, name, index)
    cfg = {"source": "path", "path": str(folder), "model_id": None, "revision": None}
    # As in transformers, the name of a repository may be a folder.
    hub = {"source": "hub", "path": None, "model_id": str(folder), "revision": None}
    for load_it in (
        lambda: fetch_target(cfg, tmp_path / "out"),
        lambda: fetch_target(hub, tmp_path / "out"),
        lambda: load_target(folder, None, CPU, torch.float32),
        lambda: load_target(folder, None, CPU, torch.float32, "transformers"),
        lambda: load_weights(folder, torch.float32),
    ):
        with pytest.raises(DraftpoolError) as caught:
            load_it()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["dflash", "eagle3", "causal_lm"])
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("name", PICKLED)
def test_a_published_drafter_with_pickled_weights_is_refused(name, index, layout, trap, targets, tmp_path):
    folder = model_folder(tmp_path / "in", trap, name, index)
    for where in ({"path": str(folder), "model_id": None}, {"path": None, "model_id": str(folder)}):
        cfg = where | {"layout": layout, "revision": None, "draft_tokens": 3, "taps": None}
        with pytest.raises(DraftpoolError) as caught:
            fetch_drafter(cfg, targets.llama, tmp_path / "out")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_shards_of_another_folder_are_refused(targets, tmp_path):
    folder = tmp_path / "in"
    causal_model("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DraftpoolError, match="names no safetensors, or other files"):
        load_target(folder, None, CPU, torch.float32)


@pytest.mark.parametrize("kind", ["block", "eagle", "independent"])
def test_a_drafter_folder_with_a_pickle_is_refused(kind, trap, targets, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"kind": kind}))
    trap(tmp_path / "model.safetensors")
    trap(tmp_path / "pytorch_model.bin")
    with pytest.raises(DraftpoolError):
        load_drafter("d", tmp_path, load_target(targets.llama, None, CPU, torch.float32))


def test_a_pickled_checkpoint_begins_afresh(trap, tmp_path):
    model = torch.nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = trap(tmp_path / "checkpoint.safetensors")
    assert load_checkpoint(path, "key", model, torch.optim.AdamW(model.parameters())) is None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_pickle_in_the_place_of_scratch_or_results_is_refused(trap, tmp_path):
    """State folders hold JSON, Parquet and safetensors, which these functions read."""
    for name in ("cell.json", "rows.jsonl", "cell.parquet"):
        trap(tmp_path / name)
    append = partial(append_tables, tmp_path / "out.parquet")
    for read in (
        lambda: read_json(tmp_path / "cell.json"),
        lambda: read_jsonl(tmp_path / "rows.jsonl"),
        lambda: read_table(tmp_path / "cell.parquet"),
        lambda: append([(tmp_path / "cell.parquet", {})]),
    ):
        with pytest.raises(DraftpoolError) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.parquet").exists()


FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "_pickle"}
# Last name of a call -> keyword and the values with which it is allowed; None: never.
FORBIDDEN_CALLS = {
    "read_pickle": None,
    "to_pickle": None,
    "unsafe_load": None,
    "full_load": None,
    "system": None,
    "popen": None,
    "eval": None,
    "exec": None,
    "extractall": None,
}


def complaints(source: str) -> list[str]:
    """What a module does that could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(node.module)
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        values = {name: getattr(value, "value", value) for name, value in keywords.items()}
        called = ast.unparse(node.func)
        last, owner = called.rsplit(".", 1)[-1], called.split(".")[0]
        # `model.eval()` is torch's; only the built-in function runs text.
        builtin = called in ("eval", "exec", "__import__", "compile")
        if (last in FORBIDDEN_CALLS and last not in ("eval", "exec")) or builtin:
            found.append(called)
        if last == "load" and owner in ("torch", "np", "numpy", "yaml", "joblib", "pickle"):
            found.append(called)
        if values.get("allow_pickle") is True or values.get("shell") is True:
            found.append(called)
        if "trust_remote_code" in values and values["trust_remote_code"] is not False:
            found.append(called)
    return found


def test_no_module_reads_pickles_or_runs_text():
    modules = sorted((REPOSITORY / "src").rglob("*.py"))
    assert len(modules) > 100
    bad = {str(path): complaints(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: found for path, found in bad.items() if found} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(p)",
        "np.load(p, allow_pickle=True)",
        "np.load(p)",
    ]
    + ["pd.read_pickle(p)", "yaml.load(t, Loader=L)", "os.system(t)", "run(t, shell=True)", "eval(t)"]
    + ["AutoModel.from_pretrained(n, trust_remote_code=True)", "import pickle as p", "archive.extractall(d)"],
)
def test_the_search_finds_what_it_is_for(source):
    assert complaints(source)


def test_every_model_is_loaded_from_safetensors_without_code():
    loads = []
    for path in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ForCausalLM.from_pretrained"):
                loads.append({keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords})
    assert len(loads) >= 4
    for keywords in loads:
        assert keywords.get("use_safetensors") == "True" or "gguf_file" in keywords


# --- names and paths --------------------------------------------------------------------------------------

BAD_NAMES = [
    "../x",
    "/tmp/x",
    "a/b",
    "a\\b",
    "a\x00b",
    "a\nb",
    "a\n",
    "~",
    "$HOME",
    "-rf",
    ".",
    "..",
    "",
    " a",
]
BAD_NAMES += ["a b", "a;b", "a'b", 'a"b', "$(touch pwned)", "`touch pwned`", "a*", "{a}", "a%", "CON:"]
# Cyrillic a, full-width slash and dots, combining accent, zero-width space, right-to-left override.
BAD_NAMES += ["\u0430", "a\uff0fb", "\uff0e\uff0e", "a\u0301", "a\u200b", "\u202ea"]


def places(name: str) -> dict[str, dict]:
    """Overlays that give a thing of the study this name."""
    config = yaml.safe_load(TINY.read_text())
    return {
        "experiment": {"experiment": name},
        "domain": {"domains": {name: config["domains"]["maths"]}},
        "drafter": {"drafters": {name: {}}},
        "pool": {
            "pools": {name: {"drafters": ["general-s0", "special_maths-s0"], "generalist": "general-s0"}}
        },
        "stream": {"decode": {"streams": {name: {}}}},
        "replayed stream": {"replay": {"streams": {name: {"domains": ["stories"]}}}},
        "selector": {"selectors": {name: {"kind": "random"}}},
        "replayed selector": {"replay": {"selectors": {name: {"kind": "random"}}}},
        "target": {"target": {"name": name}},
        "prompt set": {"prompt_sets": {name: {"kind": "sampled"}}},
        "sweep": {"sweeps": {name: config["sweeps"]["depth"]}},
        "variant": {"sweeps": {"depth": {"over": {name: {"model": {"n_layers": 2}}}}}},
        "archive": {"archives": {name: config["archives"]["pack"]}},
    }


@pytest.mark.parametrize("place", places("x"))
def test_names_that_are_no_plain_names_are_refused(place):
    tiny = yaml.safe_load(TINY.read_text())
    Plan(resolve(merge(tiny, places("plain")[place])))
    for name in BAD_NAMES:
        with pytest.raises(DraftpoolError) as caught:
            Plan(resolve(merge(tiny, places(name)[place])))
        assert "\n" not in str(caught.value), (place, name)


@pytest.mark.parametrize("key", ["package", "version", "filename"])
def test_archive_files_have_plain_names(key, tmp_path):
    for name in ("../x.whl", "/tmp/x.whl", "-rf", "a b", "$(touch pwned)", "a\n", ""):
        spec = {"package": "p", "version": "1", "filename": "p.whl", "sha256": "0" * 64} | {key: name}
        source = {"source": "archive", "archive": "a", "member": "m", "format": "jsonl", "template": "{q}"}
        source |= {"split": "both", "subset": "s", "licence": "MIT"}
        cfg = {"domain": "maths", "sources": [source], "archives": {"a": spec}}
        with pytest.raises(DraftpoolError, match="plain name"):
            read_candidates(cfg, 0, Counter())


@given(st.text(), st.sampled_from(BAD_NAMES))
def test_ids_never_leave_their_folder(text, name):
    for slug in (text, name, name + text, text + name):
        made = make_id(slug, {"a": 1})
        assert Path("results/drafters", made).resolve().parent == Path("results/drafters").resolve()
        assert made[0].isalnum() and made.isascii() and len(made) <= 61


@pytest.mark.parametrize(
    "member", ["../evil.jsonl", "/etc/evil.jsonl", "a/../../evil.jsonl", "..\\evil.jsonl"]
)
def test_members_that_leave_the_archive_are_refused(member, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(member, '{"q": "x"}\n')
    with pytest.raises(DraftpoolError, match="points outside the archive"):
        list_members(tmp_path / "a.zip", "*.jsonl")
    with pytest.raises(DraftpoolError, match="points outside the archive"):
        read_member(tmp_path / "a.zip", member)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip"]


@pytest.mark.parametrize("name", ["../heatmap_tau", "style; touch pwned", "os", "no_figure", ""])
@pytest.mark.parametrize("command", ["draw_figure", "write_table"])
def test_only_figures_and_tables_of_the_lists_are_imported(command, name, capsys):
    assert cli.main([command, f"--name={name}", "--stats", "s", "--out", "o.png"]) == 2
    assert "flag --name" in capsys.readouterr().err


# --- YAML -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["object/apply:os.system", "object/new:os.system", "name:os.system"])
def test_yaml_that_would_call_something_is_one_line(tag, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(f"experiment: !!python/{tag} ['touch pwned']\n")
    assert cli.main(["check_config", "c.yaml"]) == 2
    assert cli.main(["prepare_prompts", "--cfg", "@c.yaml", "--out", "o"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("not valid YAML in line 1") == 2 and shown.count("\n") == 2
    assert not (tmp_path / "pwned").exists()
