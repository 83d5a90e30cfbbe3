"""Every artefact says how it was made and of what, and the chain can be followed back to the target."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
import synthetic

from draftpool import cli
from draftpool.analysis.stats import compute_stats
from draftpool.artefacts import atomic_dir, read_json, sha256_file, write_json, write_provenance
from draftpool.figures import FIGURES
from draftpool.provenance.chain import Chain, artefact_of
from draftpool.provenance.contents import content_digest, contents, digest_of
from draftpool.provenance.record import seeds_of
from draftpool.provenance.secrets import mask, mask_command


def _stage(cfg, out, **flags):
    """Stand for a stage: a folder with its name and the first line of every input."""
    read = [path for value in flags.values() for path in (value if isinstance(value, list) else [value])]
    texts = [(path / "content.txt").read_text() for path in read if isinstance(path, Path) and path.is_dir()]
    with atomic_dir(out) as folder:
        (folder / "content.txt").write_text(f"{cfg}\n" + "".join(texts))
        write_provenance(folder, cfg, {"device": "cpu", "extra": 1})


def _file_stage(cfg, out, **flags):
    write_json(out, cfg)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A chain of artefacts that real sub-commands made; only the work of the stages is replaced."""
    module = types.ModuleType("pretended")
    module.stage, module.file_stage = _stage, _file_stage
    monkeypatch.setitem(sys.modules, "pretended", module)
    stages = {name: "pretended:stage" for name in cli.STAGES} | {"check_lossless": "pretended:file_stage"}
    monkeypatch.setattr(cli, "STAGES", stages)
    monkeypatch.chdir(tmp_path)
    made = {
        "results/targets/t": [
            "fetch_target",
            "--cfg",
            '{"archive": {"filename": "a.whl", "sha256": "0123"}}',
        ],
        "results/prompts/p": ["prepare_prompts", "--cfg", '{"seed": 3}'],
        "results/responses/r": [
            *("generate_responses", "--cfg", '{"device": "auto"}'),
            *("--target", "results/targets/t", "--prompts", "results/prompts/p"),
        ],
        "results/drafters/d": [
            *("train_drafter", "--cfg", '{"seed": 1, "training": {"steps": 2}}', "--init"),
            *("--target", "results/targets/t", "--responses", "results/responses/r"),
            *("--state", "results/state/d"),
        ],
        "results/lossless/l/lossless.json": [
            *("check_lossless", "--cfg", '{"device": "auto", "streams": {"mixed": {"seed": 0}}}'),
            *("--target", "results/targets/t", "--drafters", "results/drafters/d"),
            *("--prompts", "results/prompts/p"),
        ],
        "results/tiny/stats": [
            *("compute_stats", "--cfg", "{}", "--lossless", "results/lossless/l/lossless.json"),
            *("--training", "results/drafters/d", "--responses", "results/responses/r"),
        ],
    }
    for out, command in made.items():
        arguments = [*command, "--out", out]
        monkeypatch.setattr(sys, "argv", ["/bin/draftpool", *arguments])
        assert cli.main(arguments) == 0
    return tmp_path


def record(path: str | Path) -> dict:
    return read_json(Path(path))


def test_a_folder_says_what_made_it_and_what_its_inputs_held(study):
    made = record("results/drafters/d/provenance.json")
    assert made["stage"] == "train_drafter" and made["id"] == "d" and made["extra"] == 1
    assert made["command"][:2] == ["/bin/draftpool", "train_drafter"]
    assert made["versions"]["numpy"] and made["git_commit"] and isinstance(made["git_dirty"], bool)
    assert made["device"] == "cpu" and made["seeds"] == {"seed": 1}
    assert [(entry["flag"], entry["path"], entry["id"]) for entry in made["inputs"]] == [
        ("target", "results/targets/t", "t"),
        ("responses", "results/responses/r", "r"),
    ]
    for entry in made["inputs"]:
        assert entry["digest"] == record(f"{entry['path']}/provenance.json")["digest"]
    assert set(made["files"]) == {"content.txt", "resolved.yaml"}
    assert made["files"]["content.txt"]["sha256"] == sha256_file(study / "results/drafters/d/content.txt")
    assert made["started"] <= made["finished"]


def test_a_single_file_has_its_record_and_its_configuration_beside_it(study):
    made = record("results/lossless/l/provenance/lossless.json")
    assert made["cfg"] == {"device": "auto", "streams": {"mixed": {"seed": 0}}}
    assert made["device"] in ("cpu", "cuda") and made["seeds"] == {"streams.mixed.seed": 0}
    assert [entry["flag"] for entry in made["inputs"]] == ["target", "prompts", "drafters"]
    assert set(made["files"]) == {"lossless.json"} and made["id"] == "l"
    again = ["check_lossless", "--cfg", "@results/lossless/l/provenance/lossless.yaml"]
    rest = ["--target", "results/targets/t", "--drafters", "--prompts", "--out", "results/lossless/m/a.json"]
    assert cli.main([*again, *rest]) == 0
    assert record("results/lossless/m/a.json") == made["cfg"]


def test_a_file_that_the_configuration_names_is_an_input(study):
    (study / "prompts.jsonl").write_text("{}\n")
    cfg = json.dumps({"sources": [{"path": "prompts.jsonl"}, {"path": "nowhere.jsonl"}, {"path": None}]})
    assert cli.main(["prepare_prompts", "--cfg", cfg, "--out", "results/prompts/q"]) == 0
    (entry,) = record("results/prompts/q/provenance.json")["inputs"]
    assert (entry["flag"], entry["path"]) == ("cfg", "prompts.jsonl") and len(entry["digest"]) == 64


def test_a_failed_stage_leaves_no_record(study, monkeypatch, capsys):
    assert cli.main(["write_table", "--name", "nothing", "--stats", "s", "--out", "t.csv"]) == 2
    assert "flag --name: no `nothing` -> known: drafters_table" in capsys.readouterr().err
    assert not (study / "provenance").exists()


def test_digests_follow_names_and_bytes_and_nothing_else(tmp_path):
    folder = tmp_path / "a"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/one").write_text("1")
    (folder / "two").write_text("2")
    before = content_digest(folder)
    (folder / "provenance.json").write_text("{}")
    (folder / ".hidden").write_text("x")
    os.utime(folder / "two", (1, 1))
    assert content_digest(folder) == before
    shutil.copytree(folder, tmp_path / "b")
    assert content_digest(tmp_path / "b") == before
    seen = {before}
    for change in (
        lambda: (folder / "two").write_text("3"),
        lambda: (folder / "two").rename(folder / "three"),
        lambda: (folder / "four").write_text(""),
        lambda: (folder / "four").unlink(),
    ):
        change()
        seen.add(content_digest(folder))
    assert len(seen) == 4  # the last change takes the one before it back
    assert content_digest(tmp_path / "none") is None


def test_untouched_files_are_not_read_again_and_touched_ones_are(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    folder.mkdir()
    for name in ("old", "same"):
        (folder / name).write_text(name)
        os.utime(folder / name, ns=(10**18, 10**18))
    files = contents(folder)
    write_json(folder / "provenance.json", {"files": files})
    read = []
    monkeypatch.setattr(
        "draftpool.provenance.contents.sha256_file", lambda path: read.append(path.name) or sha256_file(path)
    )
    assert contents(folder) == files and read == []
    # Of the same size, so that the time alone tells.
    (folder / "old").write_text("new")
    assert digest_of(contents(folder)) != digest_of(files) and read == ["old"]
    # A file as young as its record may have been written after it.
    os.utime(folder / "provenance.json", ns=(10**18, 10**18))
    read.clear()
    contents(folder)
    assert read == ["old", "same"]
    (folder / "provenance.json").write_text('{"files": {"same": 3}}')
    assert digest_of(contents(folder)) != digest_of(files)


def test_the_tree_goes_back_to_target_and_prompts_and_tells_a_shared_one_once(study, capsys):
    assert cli.main(["provenance", "results/tiny/stats"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("results/tiny/stats\n")
    names = re.findall(r"── (\w+): (\S+)", shown)
    assert ("training", "results/drafters/d") in names and ("prompts", "results/prompts/p") in names
    assert names.count(("target", "results/targets/t")) == 3
    assert shown.count("fetch_target, commit") == 1
    assert shown.count("(told above)") == 5
    assert "pinned: a.whl sha256 0123" in shown and "seed 3" in shown
    assert "$ draftpool train_drafter --cfg @results/drafters/d/resolved.yaml" in shown
    assert shown.count("versions: ") == 1
    assert "[" not in shown.replace("[0", "")


def test_json_holds_every_artefact_once(study, capsys):
    assert cli.main(["provenance", "results/tiny/stats/content.txt", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["asked"] == ["results/tiny/stats"]
    assert set(told["artefacts"]) == {
        "results/tiny/stats",
        "results/lossless/l/lossless.json",
        "results/targets/t",
        "results/prompts/p",
        "results/drafters/d",
        "results/responses/r",
    }
    for artefact in told["artefacts"].values():
        assert artefact["state"] == "unchanged"
        assert all(entry["state"] == "unchanged" and entry["recorded"] for entry in artefact["inputs"])


def test_several_files_share_their_ancestors_and_can_be_written_as_a_page(study, capsys):
    asked = ["results/drafters/d", "results/responses/r", "results/lossless/l/lossless.json"]
    assert cli.main(["provenance", *asked]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("results/")] == [asked[0], asked[2]]
    assert shown.count("fetch_target, commit") == 1
    assert cli.main(["provenance", *asked, "--out", "p.html"]) == 0
    page = (study / "p.html").read_text()
    assert capsys.readouterr().out == "" and html.unescape(page).count(shown.rstrip("\n")) == 1


def test_what_is_no_longer_what_was_read_is_flagged(study, capsys):
    (study / "results/responses/r/content.txt").write_text("edited")
    shutil.rmtree(study / "results/prompts/p")
    assert cli.main(["provenance", "results/drafters/d/content.txt"]) == 0
    shown = capsys.readouterr().out
    assert "responses: results/responses/r  [changed since]" in shown
    assert "prompts: results/prompts/p  [missing]" in shown
    assert "target: results/targets/t\n" in shown
    (study / "results/drafters/d/content.txt").write_text("edited")
    assert cli.main(["provenance", "results/drafters/d"]) == 0
    assert capsys.readouterr().out.startswith("results/drafters/d  [changed since]\n")
    (study / "results/drafters/d/content.txt").unlink()
    assert cli.main(["provenance", "results/drafters/d"]) == 0
    assert capsys.readouterr().out.startswith("results/drafters/d  [missing]\n")


def test_results_may_be_moved_and_asked_for_from_anywhere(study, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.move(study / "results", elsewhere / "results")
    monkeypatch.chdir("/")
    chain = Chain(elsewhere / "results/tiny/stats")
    assert len(chain.nodes) == 6
    assert all(not node.state and not any(link.state for link in node.links) for node in chain.nodes)


def test_results_of_jobs_that_worked_on_copies_are_followed_where_they_are_kept(study, tmp_path_factory):
    """As the storage plugins of Snakemake do: paths in the records are those of local copies, gone by now."""
    disk = tmp_path_factory.mktemp("disk")
    shutil.move(study / "results", disk / "results")
    for path in disk.rglob("*.json"):
        made = record(path)
        if "out" in made:
            made["out"] = f".snakemake/storage/fs{disk}/{made['out']}"
            for entry in made["inputs"]:
                entry["path"] = f".snakemake/storage/fs{disk}/{entry['path']}"
            write_json(path, made)
    chain = Chain(disk / "results/tiny/stats")
    assert len(chain.nodes) == 6 and all(not link.state for node in chain.nodes for link in node.links)


def test_versions_are_told_where_they_differ(study, capsys):
    path = study / "results/responses/r/provenance.json"
    made = record(path)
    made["versions"]["torch"] = "1.0"
    write_json(path, made)
    assert cli.main(["provenance", "results/drafters/d"]) == 0
    assert "versions: torch 1.0" in capsys.readouterr().out


def test_artefacts_of_earlier_versions_are_shown_as_far_as_they_tell(study, capsys):
    path = study / "results/targets/t/provenance.json"
    write_json(path, {"command": ["draftpool", "fetch_target"], "git_commit": None})
    assert cli.main(["provenance", "results/drafters/d"]) == 0
    shown = capsys.readouterr().out
    assert "stage not recorded, no commit known" in shown and "inputs not recorded" in shown


def test_a_local_copy_of_the_storage_plugin_that_is_gone_is_found_on_its_disk(study):
    copy = study / ".snakemake/storage/fs" / str(study / "results/drafters/d").lstrip("/")
    shutil.copytree(study / "results/drafters/d", copy)
    made = record(copy / "provenance.json")
    made["out"] = str(copy.relative_to(study))
    for entry in made["inputs"]:
        entry["path"] = f".snakemake/storage/fs{study}/{entry['path']}"
    write_json(copy / "provenance.json", made)
    assert [link.path for link in Chain(copy).tops[0].links] == [
        study / "results/targets/t",
        study / "results/responses/r",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"command": 3}',
        '{"command": [], "inputs": [3]}',
        '{"command": [], "files": {"a": {}}}',
    ]
    + ['{"command": [], "inputs": [{"flag": "a"}]}', '{"command": [], "versions": []}', "\x00"],
)
def test_a_damaged_record_is_one_line_even_far_down_the_chain(study, text, capsys):
    (study / "results/targets/t/provenance.json").write_text(text)
    for asked in ("results/targets/t", "results/tiny/stats"):
        assert cli.main(["provenance", asked]) == 2
        shown = capsys.readouterr().err
        assert "results/targets/t/provenance.json: damaged provenance" in shown and shown.count("\n") == 1


def test_files_outside_any_artefact_are_one_line(study, capsys):
    (study / "results/index.csv").write_text("id\n")
    for asked, message in (
        ("results/index.csv", "belongs to no artefact"),
        ("results", "belongs to no artefact"),
        ("results/none", "no such file or folder"),
    ):
        assert cli.main(["provenance", asked]) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1


def test_the_copied_summary_stands_for_the_statistics(study):
    shutil.copy(study / "results/tiny/stats/content.txt", study / "results/tiny/content.txt")
    assert artefact_of(Path("results/tiny/content.txt")) == study / "results/tiny/stats"


def test_every_figure_has_its_record_and_stays_the_same_in_its_bytes(tmp_path, monkeypatch, capsys):
    cfg = synthetic.study(["code", "maths"], specialists=True, sweeps=False, n_resamples=100)
    compute_stats(**synthetic.write_study(tmp_path, cfg, prompts=3, length=20), out=tmp_path / "stats")
    monkeypatch.chdir(tmp_path)
    name = "objectives"
    assert name in FIGURES
    bytes_of = []
    for _ in range(2):
        out = f"tiny/figures/{name}.png"
        assert cli.main(["draw_figure", "--name", name, "--stats", "stats", "--out", out]) == 0
        bytes_of.append([Path(out).with_suffix(end).read_bytes() for end in (".png", ".pdf")])
    assert bytes_of[0] == bytes_of[1]
    table = "tiny/tables/drafters_table.csv"
    assert cli.main(["write_table", "--name", "drafters_table", "--stats", "stats", "--out", table]) == 0
    made = record(f"tiny/figures/provenance/{name}.json")
    assert set(made["files"]) == {f"{name}.png", f"{name}.pdf"} and made["stage"] == "draw_figure"
    assert {path.name for path in Path("tiny/figures").iterdir()} == {*made["files"], "provenance"}
    # The record alone tells the chain too, and that the figure is gone.
    Path("tiny/tables/drafters_table.tex").unlink()
    for asked in (f"figures/{name}.pdf", f"figures/provenance/{name}.json", "tables/drafters_table.md"):
        capsys.readouterr()
        assert cli.main(["provenance", f"tiny/{asked}"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"tiny/{asked.split('/')[0]}/") and "── stats: stats" in shown
        assert ("[missing]" in shown) == ("table" in asked)


def test_every_seed_is_found():
    cfg = {"seed": 1, "a": [{"seeds": [1, 2]}, {"b": {"selector_seeds": [3]}}], "bootstrap": {"seed": 4}}
    assert seeds_of(cfg) == {
        "seed": 1,
        "a.0.seeds": [1, 2],
        "a.1.b.selector_seeds": [3],
        "bootstrap.seed": 4,
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://user:s3cret@host/a and http://tok@h", "see https://***@host/a and http://***@h"),
        ("--token=abc max_new_tokens=96", "--token=*** max_new_tokens=96"),
        ('{"api_key": "abc", "tokenizer": "x"}', '{"api_key": "***", "tokenizer": "x"}'),
        ("https://h/?access_token=abc&b=1", "https://h/?access_token=***&b=1"),
        ("password: abc", "password: ***"),
        ("no eos_token: 3, mask_token_id=4", "no eos_token: 3, mask_token_id=4"),
        ("mail a@b.org, 12:30 at https://host/@x", "mail a@b.org, 12:30 at https://host/@x"),
    ],
)
def test_secrets_are_masked_and_nothing_else(text, shown, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("SOME_TOKEN", "1")
    assert mask(text) == shown
    assert mask(f"{text} hf_0123456789 1") == f"{shown} *** 1"


def test_the_word_after_a_secret_flag_is_masked():
    command = ["draftpool", "--token", "abc", "--threads", "2", "--password=x", "--max_new_tokens", "3"]
    masked = ["draftpool", "--token", "***", "--threads", "2", "--password=***", "--max_new_tokens", "3"]
    assert mask_command(command) == masked
