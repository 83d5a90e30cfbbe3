"""Tables of the docs come from `results/`, and stay where a study is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import synthetic

from draftpool.analysis.stats import compute_stats
from draftpool.tables import TABLES

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "fill_results.py"


@pytest.fixture
def script(tmp_path):
    spec = importlib.util.spec_from_file_location("fill_results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RESULTS, module.DOCS = tmp_path / "results", tmp_path
    return module


def test_every_view_is_a_table_of_its_study(script, tmp_path):
    cfg = synthetic.study(["code", "maths"], sweeps=True, n_resamples=100)
    inputs = synthetic.write_study(tmp_path / "in", cfg, prompts=3, length=20)
    compute_stats(**inputs, out=tmp_path / "results" / "synthetic" / "stats")
    stats = tmp_path / "results" / "synthetic" / "stats"
    for table in ("leaderboard_table", "streams_table", "pools_table"):
        module = importlib.import_module(f"draftpool.tables.{table}")
        module.write(stats, tmp_path / "results" / "synthetic" / "tables" / f"{table}.csv")
    for name in script.VIEWS:
        lines = script.block("synthetic", name).splitlines()
        assert lines[0].startswith("| ") and lines[1].startswith("| ---") and len(lines) > 2, name
        assert len({line.count(" | ") for line in lines}) == 1, name


def test_blocks_of_missing_studies_are_kept(script, tmp_path):
    text = "a\n<!-- fill: nowhere/compare -->\nold\n<!-- end -->\n<!-- fill: bench/decode -->\nx\n<!-- end -->\nb\n"
    for name in ("results.md", "performance.md"):
        (tmp_path / name).write_text(text)
    script.main()
    assert (tmp_path / "results.md").read_text() == text
    (tmp_path / "results" / "bench").mkdir(parents=True)
    rows = '{"rows": {"plain": {"median": 2.0, "low": 1.0, "high": 3.0, "n": 4, "unit": "ms"}}}'
    (tmp_path / "results" / "bench" / "decode.json").write_text(rows)
    script.main()
    made = (tmp_path / "results.md").read_text()
    assert "| plain | 2 | 1 to 3 | ms |" in made and "\nold\n" in made and "\nx\n" not in made


def test_the_docs_name_only_blocks_that_exist(script):
    known = {*script.VIEWS, *TABLES, "claims"}
    for name in ("results.md", "performance.md"):
        for _, study, block, _ in script.BLOCK.findall((SCRIPT.parent / name).read_text()):
            assert study == "bench" or block in known, (name, study, block)
