"""Artefacts are written whole or not at all, and what cannot be read is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draftpool import artefacts
from draftpool.errors import DraftpoolError


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_on_success_and_untouched_on_failure(tmp_path):
    path = tmp_path / "deep/file.txt"
    with artefacts.atomic_path(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one"
    with pytest.raises(KeyboardInterrupt), artefacts.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "one"
    assert left_behind(path.parent) == ["file.txt"]


def test_a_folder_is_replaced_on_success_and_untouched_on_failure(tmp_path):
    path = tmp_path / "folder"
    for content in ("one", "two"):
        with artefacts.atomic_dir(path) as temporary:
            (temporary / content).write_text(content)
    assert left_behind(path) == ["two"]
    with pytest.raises(ZeroDivisionError), artefacts.atomic_dir(path) as temporary:
        (temporary / "three").write_text("half")
        raise ZeroDivisionError
    assert left_behind(path) == ["two"]
    assert left_behind(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "the disk is full -> free some space"),
        (errno.EDQUOT, "the disk is full -> free some space"),
        (errno.EACCES, "cannot write here -> check the permissions"),
        (errno.EROFS, "cannot write here -> check the permissions"),
    ],
)
def test_a_full_or_closed_disk_is_one_line_and_leaves_nothing(tmp_path, code, message):
    path = tmp_path / "file.txt"
    with pytest.raises(DraftpoolError) as caught, artefacts.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise OSError(code, os.strerror(code))
    assert f"{path}: {message}" in str(caught.value) and "\n" not in str(caught.value)
    assert left_behind(tmp_path) == []
    with pytest.raises(DraftpoolError), artefacts.atomic_dir(tmp_path / "folder") as temporary:
        (temporary / "file").write_text("half")
        raise OSError(code, os.strerror(code))
    assert left_behind(tmp_path) == []


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), artefacts.atomic_path(tmp_path / "file"):
        raise FileNotFoundError
    assert left_behind(tmp_path) == []


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom draftpool.artefacts import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    assert path.read_text() == "old"


def test_artefacts_can_be_read_by_others_as_the_mask_allows(tmp_path):
    artefacts.write_json(tmp_path / "file.json", {})
    assert (tmp_path / "file.json").stat().st_mode & 0o444 == 0o444


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_is_one_ascii_line_that_reads_back(value):
    text = artefacts.canonical_json(value)
    assert text.isascii() and "\n" not in text
    assert json.loads(text) == value
    assert artefacts.canonical_json(json.loads(text)) == text


def test_canonical_json_sorts_keys_and_refuses_nan():
    assert artefacts.canonical_json({"b": 1, "a": [1.5, None]}) == '{"a":[1.5,null],"b":1}'
    with pytest.raises(ValueError):
        artefacts.canonical_json({"a": float("nan")})


def test_json_and_lines_read_back_and_name_what_is_damaged(tmp_path):
    rows = [{"id": 1, "text": "naïve\nline"}, {"id": 2, "text": "\u2028"}]
    artefacts.write_jsonl(tmp_path / "rows.jsonl", rows)
    assert artefacts.read_jsonl(tmp_path / "rows.jsonl") == rows
    artefacts.write_json(tmp_path / "one.json", rows)
    assert artefacts.read_json(tmp_path / "one.json") == rows
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n{"id": \n')
    with pytest.raises(DraftpoolError, match=r"rows\.jsonl: line 2 is not valid JSON -> delete the file"):
        artefacts.read_jsonl(tmp_path / "rows.jsonl")
    (tmp_path / "one.json").write_text("{")
    with pytest.raises(DraftpoolError, match=r"one\.json: not valid JSON .* -> delete it"):
        artefacts.read_json(tmp_path / "one.json")
    for read in (artefacts.read_json, artefacts.read_jsonl, artefacts.read_table):
        with pytest.raises(DraftpoolError, match=r"none: .*not found -> run the stage that makes it"):
            read(tmp_path / "none")


def test_tables_read_back_lists_and_all_and_name_what_is_damaged(tmp_path):
    frame = pd.DataFrame(
        {"name": ["a", "b"], "value": [1.5, float("nan")], "gamma": [[0.5, 1.0], []]}, index=[5, 7]
    )
    path = tmp_path / "table.parquet"
    artefacts.write_table(path, frame)
    read = artefacts.read_table(path)
    assert read.drop(columns="gamma").equals(frame.drop(columns="gamma").reset_index(drop=True))
    assert [list(value) for value in read["gamma"]] == [[0.5, 1.0], []]
    assert list(artefacts.read_table(path, columns=["value"]).columns) == ["value"]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DraftpoolError, match=r"table\.parquet: damaged table .* -> delete it"):
        artefacts.read_table(path)


def test_sha256_is_that_of_the_bytes(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert artefacts.sha256_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_d44_an_artefact_says_how_it_was_made(tmp_path):
    cfg = {"lr": 1e-4, "domains": ["maths"], "clip": None, "objective": {"kind": "dpace"}}
    artefacts.write_provenance(tmp_path, cfg, {"dtype": "float32"})
    assert yaml.safe_load((tmp_path / "resolved.yaml").read_text()) == cfg
    made = artefacts.read_json(tmp_path / "provenance.json")
    assert made["dtype"] == "float32"
    assert made["command"] == sys.argv
    assert made["versions"]["numpy"] and set(made) >= {"git_commit", "git_dirty", "python", "cpu_count"}


def test_errors_are_one_line_of_place_fault_and_remedy():
    assert (
        str(DraftpoolError("too\nlong", "file a", "make it\n shorter"))
        == "file a: too long -> make it shorter"
    )
    assert str(DraftpoolError("wrong")) == "wrong"


@pytest.mark.parametrize("kind", ["atomic_path", "atomic_dir"])
def test_what_a_killed_process_left_is_cleared_and_what_a_living_one_writes_is_not(tmp_path, kind):
    code = f"""
import os, signal, sys
from draftpool.artefacts import {kind}
with {kind}(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "below/result")])
    assert killed.returncode == -signal.SIGKILL
    (left,) = left_behind(tmp_path / "below")
    elsewhere = tmp_path / "below" / left.replace(artefacts._machine(), "0" * 8, 1)
    elsewhere.write_text("not ours to judge")
    with artefacts.atomic_path(tmp_path / "below/other") as living:
        artefacts.clear_leftovers(tmp_path / "below", tmp_path / "missing")
        assert left_behind(tmp_path / "below") == sorted([elsewhere.name, living.name])
