"""Prompts of a domain: sources, templates, splits, near duplicates, the domains of the default."""

import hashlib
import json
import random
import re
import zipfile
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from draftpool.artefacts import read_json, read_jsonl, write_jsonl
from draftpool.data.licences import licence_page
from draftpool.data.near_duplicates import near_duplicates, words
from draftpool.data.prompts import choose_prompts, hold_out, merge_duplicates, prepare_prompts
from draftpool.data.sources import Candidate, prompt_id
from draftpool.errors import DraftpoolError

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "config" / "default.yaml"


def question(i: int) -> dict:
    """Return a row whose words no other row has."""
    return {"q": f"alpha{i} beta{i} gamma{i}?", "a": f"answer {i}", "topic": f"t{i % 7}"}


def domain(file: Path, **changes) -> dict:
    """Return the cfg of a domain with one source, a local file split both ways."""
    source = {
        "source": "path",
        "path": str(file),
        "template": "Say: {q}",
        "reference": "a",
        "subset": "toy",
        "split": "both",
        "licence": "CC0-1.0",
    }
    source |= {key: changes.pop(key) for key in list(changes) if key in SOURCE_KEYS}
    return {
        "domain": "toy",
        "seed": 0,
        "train": 20,
        "eval": 5,
        "sources": [source],
        "archives": {},
        "split_by": None,
        "max_prompt_chars": None,
        "near_duplicate_jaccard": 0.8,
    } | changes


SOURCE_KEYS = (
    "source",
    "archive",
    "member",
    "format",
    "reader",
    "template",
    "reference",
    "group",
    "where",
    "path",
    "dataset",
    "split_name",
    "split",
)


@pytest.fixture
def rows_file(tmp_path):
    """Write 60 distinct rows."""
    write_jsonl(tmp_path / "rows.jsonl", [question(i) for i in range(60)])
    return tmp_path / "rows.jsonl"


def test_d44_files_rows_and_the_config_that_ran(rows_file, tmp_path):
    cfg = domain(rows_file)
    prepare_prompts(cfg, tmp_path / "out")
    train, held_out = (
        read_jsonl(tmp_path / "out" / "train.jsonl"),
        read_jsonl(tmp_path / "out" / "eval.jsonl"),
    )
    assert len(train) == 20 and len(held_out) == 5
    assert {row["id"] for row in train}.isdisjoint(row["id"] for row in held_out)
    row = train[0]
    assert set(row) == {"id", "domain", "subset", "split", "prompt", "reference", "source", "licence"}
    text = row["prompt"][0]["content"]
    assert row["prompt"] == [{"role": "user", "content": text}] and text.startswith("Say: alpha")
    assert row["id"] == "toy-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    assert (
        row["reference"].startswith("answer")
        and row["source"] == "rows.jsonl"
        and row["licence"] == "CC0-1.0"
    )
    assert yaml.safe_load((tmp_path / "out" / "resolved.yaml").read_text()) == cfg
    assert read_json(tmp_path / "out" / "provenance.json")["versions"]


def test_d49_changed_template_changes_the_ids(rows_file):
    first, second = (
        choose_prompts(domain(rows_file, template=text))[0] for text in ("Say: {q}", "Tell: {q}")
    )
    assert {c.id for c in first}.isdisjoint(c.id for c in second)


def test_file_order_does_not_matter_but_the_seed_does(tmp_path):
    rows = [question(i) | {"q": f"word{i} of row {i}" if i % 3 else f"double {i % 7}"} for i in range(60)]
    outcomes = []
    for shuffle in range(3):
        random.Random(shuffle).shuffle(rows)
        write_jsonl(tmp_path / "rows.jsonl", rows)
        outcomes.append(choose_prompts(domain(tmp_path / "rows.jsonl", split_by="group", group="topic")))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    other = choose_prompts(domain(tmp_path / "rows.jsonl", split_by="group", group="topic", seed=1))
    assert [c.id for c in other[1]] != [c.id for c in outcomes[0][1]]


def test_fewer_rows_than_wanted_are_all_used_and_counted(rows_file, tmp_path):
    prepare_prompts(domain(rows_file, train=500), tmp_path / "out")
    counts = read_json(tmp_path / "out" / "counts.json")
    assert counts["train"] == {"wanted": 500, "available": 55, "written": 55}
    assert counts["eval"] == {"wanted": 5, "written": 5} and counts["found"] == 60
    assert counts["subsets"] == {"toy": {"found": 60, "train": 55, "eval": 5}}
    _, held_out, counts = choose_prompts(domain(rows_file, train=0, eval=500))
    assert len(held_out) == 60 and counts["eval"] == {"wanted": 500, "written": 60}


def test_every_dropped_row_is_counted(tmp_path):
    rows = [
        {"q": "same words here"},
        {"q": "same words here"},
        {"q": "x" * 50},
        {"q": None},
        {"q": "skip this row"},
    ]
    rows += [{"q": f"alpha{i} beta{i}"} for i in range(6)]
    write_jsonl(tmp_path / "r.jsonl", rows)
    cfg = domain(
        tmp_path / "r.jsonl",
        template="{q}",
        reference=None,
        where={"q": {"matches": "^(?!skip)"}},
        max_prompt_chars=30,
    )
    train, held_out, counts = choose_prompts(cfg | {"eval": 2})
    assert counts["dropped"] == {
        "filtered": 1,
        "empty": 1,
        "too_long": 1,
        "duplicate": 1,
        "held_out_group": 0,
        "near_duplicate": 0,
    }
    assert len(train) + len(held_out) + 4 == counts["found"] == 11


def test_duplicates_between_sources_go_to_the_stricter_side(tmp_path):
    for name in ("train", "eval"):
        write_jsonl(
            tmp_path / f"{name}.jsonl", [question(i) for i in range(10)] + [question(100 + len(name))]
        )
    cfg = domain(tmp_path / "train.jsonl", split="train")
    cfg["sources"].append(
        cfg["sources"][0] | {"path": str(tmp_path / "eval.jsonl"), "split": "eval", "subset": "held"}
    )
    train, held_out, counts = choose_prompts(cfg | {"eval": 3})
    assert [c.text for c in train] == ["Say: alpha105 beta105 gamma105?"]
    assert counts["dropped"]["duplicate"] == 10 and {c.subset for c in held_out} == {"held"}


candidates_strategy = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from(["train", "eval", "both"]),
        st.lists(st.integers(0, 8), max_size=3),
        st.integers(0, 3),
    ),
    max_size=60,
)


def make_candidates(raw) -> list[Candidate]:
    """Return candidates of drawn (text, split, groups, subset)."""
    return [
        Candidate(
            f"d-{i}",
            f"text {i}",
            split,
            tuple(f"g{g}" for g in groups),
            f"s{subset}",
            None,
            "file",
            "CC0-1.0",
        )
        for i, split, groups, subset in raw
    ]


def components(candidates) -> dict[str, set[str]]:
    """Return id -> ids reachable over shared keys or ids, by naive spreading."""
    reach = {c.id: {c.id} for c in candidates}
    changed = True
    while changed:
        changed = False
        for a in candidates:
            for b in candidates:
                if (set(a.groups) & set(b.groups) or a.id == b.id) and reach[a.id] != reach[b.id]:
                    reach[a.id] = reach[b.id] = reach[a.id] | reach[b.id]
                    changed = True
    return reach


@settings(deadline=None)
@given(candidates_strategy, st.integers(0, 20), st.randoms(use_true_random=False))
def test_groups_never_stand_on_both_sides(raw, wanted, shuffler):
    candidates = make_candidates(raw)
    unique, groups = merge_duplicates(candidates)
    assert len({c.id for c in unique}) == len(unique) == len({c.id for c in candidates})
    reach = components(candidates)
    assert groups == {key: min(reached) for key, reached in reach.items()}
    unique.sort(key=lambda c: c.id)
    held_out, rest = hold_out(unique, groups, wanted)
    assert sorted(c.id for c in held_out + rest) == [c.id for c in unique]
    assert all(c.split != "train" for c in held_out)
    assert len(held_out) == min(wanted, sum(c.split != "train" for c in unique))
    taken = {groups[c.id] for c in held_out}
    train = [c for c in rest if c.split != "eval" and groups[c.id] not in taken]
    keys = {key for c in candidates if groups[c.id] in taken for key in c.groups}
    assert all(keys.isdisjoint(c.groups) for c in train)
    # The input order must not matter.
    shuffler.shuffle(candidates)
    again, groups_again = merge_duplicates(candidates)
    assert groups_again == groups and sorted(again, key=lambda c: c.id) == unique


def test_groups_of_a_split_are_spread_within_the_budget(tmp_path):
    write_jsonl(tmp_path / "r.jsonl", [question(i) | {"topic": f"t{i % 20}"} for i in range(200)])
    cfg = domain(tmp_path / "r.jsonl", split_by="group", group="topic", train=1000, eval=24)
    train, held_out, counts = choose_prompts(cfg)
    per_group = Counter(c.groups for c in held_out)
    assert sorted(per_group.values()) == [4, 5, 5, 5, 5], "5 of 20 groups, row by row"
    assert {c.groups for c in train}.isdisjoint(per_group) and len(train) == 150
    assert counts["dropped"]["held_out_group"] == 50 - 24
    # More rows than the budget's groups hold: further groups are taken.
    train, held_out, _ = choose_prompts(cfg | {"eval": 77})
    assert len(held_out) == 77 and len({c.groups for c in held_out}) == 8 and len(train) == 120


def test_a_domain_may_be_held_out_only(tmp_path):
    rows = [question(i) | {"topic": f"t{max(0, i - 30)}"} for i in range(36)]
    write_jsonl(tmp_path / "r.jsonl", rows)
    cfg = domain(tmp_path / "r.jsonl", split="eval", split_by="group", group="topic", train=0, eval=8)
    prepare_prompts(cfg, tmp_path / "out")
    assert read_jsonl(tmp_path / "out" / "train.jsonl") == []
    _, held_out, counts = choose_prompts(cfg)
    assert len(read_jsonl(tmp_path / "out" / "eval.jsonl")) == len(held_out) == 8
    assert sorted(Counter(c.groups for c in held_out).values()) == [1, 1, 1, 1, 1, 3], (
        "no group crowds out others"
    )
    assert counts["train"] == {"wanted": 0, "available": 0, "written": 0}


texts = st.lists(
    st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f"]), max_size=6).map(" ".join), max_size=12
)


@given(texts, texts, st.sampled_from([0.2, 0.5, 0.75, 0.8, 1.0]))
def test_near_duplicates_against_a_double_loop(rows, held_out, threshold):
    def jaccard(a, b):
        union = words(a) | words(b)
        return len(words(a) & words(b)) / len(union) if union else 0.0

    naive = [any(jaccard(a, b) > threshold for b in held_out) for a in rows]
    assert near_duplicates(rows, held_out, threshold).tolist() == naive


def test_near_duplicates_of_held_out_rows_leave_train(tmp_path):
    held = "one two three four five six seven eight nine ten"
    write_jsonl(tmp_path / "e.jsonl", [{"q": held}])
    near = held.upper() + " eleven"
    write_jsonl(tmp_path / "t.jsonl", [{"q": near}, {"q": "one two three four five other words"}])
    cfg = domain(tmp_path / "t.jsonl", template="{q}", reference=None, split="train", eval=1)
    cfg["sources"].append(cfg["sources"][0] | {"path": str(tmp_path / "e.jsonl"), "split": "eval"})
    train, _, counts = choose_prompts(cfg)
    assert [c.text for c in train] == ["one two three four five other words"]
    assert counts["dropped"]["near_duplicate"] == 1


def test_template_braces_and_values_are_literal(tmp_path):
    write_jsonl(tmp_path / "r.jsonl", [{"q": "{a} {0.__class__}", "a": f"x{i}"} for i in range(9)])
    train, _, _ = choose_prompts(domain(tmp_path / "r.jsonl", template="{{{q}}} {a}"))
    assert {c.text for c in train} <= {f"{{{{a}} {{0.__class__}}}} x{i}" for i in range(9)}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"template": "{q} {missing}"},
            r"domains.toy.sources\[0\].template: no field 'missing'.*a, q, topic",
        ),
        ({"template": "{q.__class__}"}, r"template: no field 'q.__class__'"),
        ({"template": "{q"}, r"sources\[0\].template"),
        ({"template": "no field at all"}, r"template: no \{field\}"),
        ({"template": None}, r"template: this key is missing"),
        ({"reference": "missing"}, r"sources\[0\].reference: no field 'missing'"),
        ({"group": "missing", "split_by": "group"}, r"sources\[0\].group: no field 'missing'"),
        ({"where": {"missing": 1}}, r"sources\[0\].where.missing: no field 'missing'"),
        ({"where": {"q": {"like": "x"}}}, r"where.q: unknown condition"),
        ({"where": {"q": {"matches": "("}}}, r"where.q.matches: bad regular expression"),
        ({"reader": "nope"}, r"sources\[0\].reader: unknown reader 'nope'"),
        ({"reader": "claims"}, r"sources\[0\].reader: a record of rows.jsonl does not have the shape"),
        ({"source": "ftp"}, r"sources\[0\].source: unknown source 'ftp'"),
        ({"split": "dev"}, r"sources\[0\].split: unknown split 'dev'"),
        ({"path": "rows.csv"}, r"sources\[0\].path: cannot read 'rows.csv'"),
        ({"path": "absent.jsonl"}, r"absent.jsonl: file not found"),
        ({"source": "archive", "archive": "absent"}, r"sources\[0\].archive: unknown archive 'absent'"),
        ({"source": "hub", "dataset": "d"}, r"sources\[0\].split_name: this key is missing"),
        ({"where": {"q": "none has this"}}, r"domains.toy.train: domain with no prompts"),
        (
            {"where": {"q": "none has this"}, "train": 0},
            r"domains.toy.eval: domain with no prompts.*filtered.: 60",
        ),
        ({"split": "eval"}, r"domains.toy.train: domain with no prompts"),
    ],
)
def test_bad_blocks_name_the_domain_and_the_key(rows_file, tmp_path, changes, message):
    with pytest.raises(DraftpoolError, match=message):
        prepare_prompts(domain(rows_file, **changes), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"], "nothing half-written"


def archive_domain(tmp_path, monkeypatch, members, **changes) -> dict:
    """Return the cfg of a domain that reads a cached archive."""
    monkeypatch.setenv("DRAFTPOOL_CACHE", str(tmp_path))
    path = tmp_path / "toy-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    spec = {
        "package": "toy",
        "version": "1",
        "filename": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    changes = {"source": "archive", "archive": "toy", "path": None} | changes
    return domain(path, **changes) | {"archives": {"toy": spec}}


def test_archive_formats_and_globs(tmp_path, monkeypatch):
    halves = [[question(i) for i in range(20)], [question(i) for i in range(20, 40)]]
    # U+2028 is a line break to str.splitlines, not to JSON Lines.
    halves[0][0]["q"] = "one\u2028line"
    lines = ["\n".join(json.dumps(row, ensure_ascii=False) for row in half).encode() for half in halves]
    members = {
        "d/a.jsonl": lines[0],
        "d/b.jsonl": lines[1],
        "d/all.json": json.dumps(halves[0] + halves[1]).encode(),
    }
    members["d/all.yaml"] = yaml.safe_dump(halves[0] + halves[1]).encode()
    results = []
    for member, kind in (("d/*.jsonl", "jsonl"), ("d/all.json", "json"), ("d/all.yaml", "yaml")):
        cfg = archive_domain(tmp_path, monkeypatch, members, member=member, format=kind, train=100)
        train, held_out, _ = choose_prompts(cfg)
        results.append(([c.text for c in train], [c.text for c in held_out]))
        assert {c.source.split("/", 1)[0] for c in train} == {"toy==1"}
    assert results[0] == results[1] == results[2] and len(results[0][0]) == 35


@pytest.mark.parametrize(
    "content, kind, message",
    [
        (b'{"q": 1}\n{', "jsonl", "line 2 of toy==1/d is not JSON"),
        (b"{", "json", "toy==1/d is not JSON"),
        (b"{[", "yaml", "toy==1/d is not YAML"),
        (b"\xff", "jsonl", "not UTF-8"),
        (b"", "xml", "unknown format 'xml'"),
        (b"", None, "format: this key is missing"),
    ],
)
def test_bad_members(tmp_path, monkeypatch, content, kind, message):
    cfg = archive_domain(tmp_path, monkeypatch, {"d": content}, member="d", format=kind, reference=None)
    with pytest.raises(DraftpoolError, match=message):
        choose_prompts(cfg)


def test_missing_member(tmp_path, monkeypatch):
    cfg = archive_domain(tmp_path, monkeypatch, {"d": b""}, member="gone/*.jsonl", format="jsonl")
    with pytest.raises(
        DraftpoolError, match=r"domains.toy.sources\[0\].member: no member 'gone/\*.jsonl' in toy-1"
    ):
        choose_prompts(cfg)


def test_parquet_and_hub_give_the_same_prompts_as_jsonl(rows_file, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = read_jsonl(rows_file)
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows)
    expected = [c.text for c in choose_prompts(domain(rows_file))[0]]
    assert [c.text for c in choose_prompts(domain(tmp_path / "rows.parquet"))[0]] == expected
    hub = domain(rows_file, source="hub", path=None, dataset=str(tmp_path / "hub"), split_name="train")
    train, _, _ = choose_prompts(hub)
    assert [c.text for c in train] == expected and train[0].source == f"{tmp_path / 'hub'}:train"
    hub["sources"][0]["split_name"] = "gone"
    with pytest.raises(DraftpoolError, match=r"domains.toy.sources\[0\].dataset: cannot load data set"):
        choose_prompts(hub)


def test_prompt_ids_are_stable():
    assert prompt_id("sql", "SELECT") == "sql-" + hashlib.sha256(b"SELECT").hexdigest()[:12]


def test_licence_page_is_in_step_with_the_configuration():
    blocks = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    page = licence_page(blocks["archives"], blocks["domains"])
    assert (REPOSITORY / "docs" / "licences.md").read_text(encoding="utf-8") == page
    for block in blocks["domains"].values():
        for source in block["sources"]:
            assert f"| {source['subset']} |" in page and source["licence"] in page


OUT_OF_DOMAIN = ("biomed", "finance")


def real_domain(name: str, **changes) -> dict:
    """Return the cfg of a domain of the default configuration."""
    blocks = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    cfg = {"domain": name, "seed": 0, "archives": blocks["archives"], "near_duplicate_jaccard": 0.8}
    return cfg | blocks["domains"][name] | changes


@pytest.mark.network
@pytest.mark.parametrize("name", ["code", "maths", "sql", "summarisation", "rag", "qa"])
def test_default_domains_from_the_real_archives(name):
    cfg = real_domain(name, train=150, eval=24)
    train, held_out, counts = choose_prompts(cfg)
    assert len(train) == 150 and len(held_out) == 24, counts
    assert {key for c in train for key in c.groups}.isdisjoint(key for c in held_out for key in c.groups)
    assert not near_duplicates([c.text for c in train], [c.text for c in held_out], 0.8).any()
    assert max(len(c.text) for c in train + held_out) <= cfg["max_prompt_chars"]


def test_the_default_has_these_domains_and_trains_on_six():
    blocks = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["domains"]
    trained = {name for name, block in blocks.items() if block["train"] > 0}
    assert trained == {"code", "maths", "sql", "summarisation", "rag", "qa"}
    assert set(blocks) - trained == set(OUT_OF_DOMAIN)
    assert all(source["split"] == "eval" for name in OUT_OF_DOMAIN for source in blocks[name]["sources"])


@pytest.mark.network
@pytest.mark.parametrize("name", OUT_OF_DOMAIN)
@pytest.mark.parametrize("seed", [0, 1])
def test_out_of_domain_prompts_from_the_real_archives(name, seed):
    cfg = real_domain(name, seed=seed)
    train, held_out, counts = choose_prompts(cfg)
    assert train == [] and len(held_out) == 24, counts
    texts = [c.text for c in held_out]
    assert max(map(len, texts)) <= 900 and min(map(len, texts)) > 60
    # Varied: no source crowds out the others, and no two prompts differ in numbers only.
    assert max(count["eval"] for count in counts["subsets"].values()) <= 9
    assert min(count["eval"] for count in counts["subsets"].values()) >= 1
    assert len({re.sub(r"\d[\d.,]*", "#", text) for text in texts}) == 24
    assert all(len(c.reference) > 2 for c in held_out if c.reference is not None)


def test_a_dot_reads_inside_a_field_of_a_hub_data_set(tmp_path):
    rows = [{"translation": {"de": f"Satz {i} wort{i}", "en": f"Sentence {i}"}} for i in range(40)]
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows)
    cfg = domain(tmp_path, source="hub", path=None, dataset=str(tmp_path / "hub"), split_name="train[:30]")
    cfg["sources"][0] |= {"template": "Translate: {translation.de}", "reference": "translation.en"}
    train, held_out, counts = choose_prompts(cfg)
    assert counts["found"] == 30  # a slice of the split, as `datasets` reads it
    assert {c.text: c.reference for c in [*train, *held_out]} == {
        f"Translate: Satz {i} wort{i}": f"Sentence {i}"
        for i in range(30)
        if f"Translate: Satz {i} wort{i}" in {c.text for c in [*train, *held_out]}
    }
    cfg["sources"][0]["template"] = "{translation.fr}"
    with pytest.raises(DraftpoolError, match=r"no field 'fr' in a row.*use one of: de, en"):
        choose_prompts(cfg)


def test_conversations_of_a_hub_data_set_give_their_first_message(tmp_path):
    rows = [
        {
            "id": str(i),
            "conversations": [{"from": "human", "value": f"q{i} w{i}"}, {"from": "gpt", "value": f"a{i}"}],
        }
        for i in range(12)
    ]
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows)
    cfg = domain(tmp_path, source="hub", path=None, dataset=str(tmp_path / "hub"), split_name="train")
    cfg["sources"][0] |= {"reader": "first_user_message", "template": "{question}", "reference": "answer"}
    cfg |= {"train": 12, "eval": 0}
    train, held_out, _ = choose_prompts(cfg)
    assert held_out == [] and {c.text: c.reference for c in train} == {
        f"q{i} w{i}": f"a{i}" for i in range(12)
    }


def test_a_domain_that_is_trained_on_only_has_an_empty_held_out_file(rows_file, tmp_path):
    prepare_prompts(domain(rows_file, train=40, eval=0), tmp_path / "out")
    assert read_jsonl(tmp_path / "out" / "eval.jsonl") == []
    assert len(read_jsonl(tmp_path / "out" / "train.jsonl")) == 40
    assert read_json(tmp_path / "out" / "counts.json")["eval"] == {"wanted": 0, "written": 0}
