"""Tables: one data frame as CSV, Markdown and LaTeX."""

import importlib
import re
from xml.etree import ElementTree

import pandas as pd
import pytest
import synthetic

from draftpool.analysis.stats import compute_stats
from draftpool.errors import DraftpoolError
from draftpool.tables import TABLES
from draftpool.tables.writer import escape_latex, interval_text, write_all


@pytest.fixture(scope="module")
def stats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    inputs = synthetic.write_study(
        folder, synthetic.study(["code", "maths"], n_resamples=100), prompts=3, length=20
    )
    compute_stats(**inputs, out=folder / "stats")
    return folder / "stats"


def write(name, stats, out) -> pd.DataFrame:
    importlib.import_module(f"draftpool.tables.{name}").write(stats, out)
    return pd.read_csv(out)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_written_three_times_with_the_same_rows(name, stats, tmp_path):
    frame = write(name, stats, tmp_path / f"{name}.csv")
    markdown = (tmp_path / f"{name}.md").read_text()
    latex = (tmp_path / f"{name}.tex").read_text()
    assert len(frame) > 1
    assert sum(line.startswith("| ") for line in markdown.splitlines()) == len(frame) + 2  # head and rule
    assert latex.count(r"\\" + "\n") == len(frame) + 1
    assert "Brackets: 95 % bootstrap intervals over prompts." in markdown
    assert "nan" not in markdown.lower()


def test_the_dpace_table_shows_tau_of_recipes_and_speedup_of_live_runs(stats, tmp_path):
    frame = write("dpace_table", stats, tmp_path / "a.csv").set_index(["drafter", "measure"])
    taus = pd.read_csv(stats / "tau.csv")
    chosen = taus[
        (taus["level"] == "recipe") & (taus["drafter"] == "generalist_dpace") & (taus["metric"] == "tau")
    ]
    row = chosen.set_index("scope").loc["code"]
    assert frame.loc[("generalist_dpace", "tau"), "code"] == interval_text(row)
    assert frame.loc[("generalist_dpace", "tau"), "n (domain / all)"] == "3 / 6"
    assert ("generalist_dflash-s1", "speed-up") in frame.index


def test_the_metasd_table_is_ordered_by_speedup(stats, tmp_path):
    frame = write("metasd_table", stats, tmp_path / "a.csv")
    column = next(name for name in frame if name.startswith("all"))
    values = frame[column].str.split(" ").str[0].astype(float)
    assert values.is_monotonic_decreasing
    assert {"plain", "ucb_bd", "fixed:generalist_long-s0"} <= set(frame["method"])


def test_a_table_without_its_data_says_so(stats, tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(DraftpoolError, match="no selectors statistics"):
        write("metasd_table", tmp_path, tmp_path / "a.csv")


def test_latex_and_markdown_are_escaped(tmp_path):
    frame = pd.DataFrame({"a_b": ["50 % & {x} | ~^\\", None], "n": [1, 2]})
    write_all(frame, tmp_path / "t.csv", "a note")
    latex, markdown = (tmp_path / "t.tex").read_text(), (tmp_path / "t.md").read_text()
    assert r"{a\_b} & {n} \\" in latex
    assert r"{50 \% \& \{x\} | \textasciitilde{}\textasciicircum{}\textbackslash{}} & {1} \\" in latex
    assert r"{-} & {2} \\" in latex
    assert "50 % & {x} \\| ~^\\" in markdown
    assert markdown.endswith("a note\n")
    assert pd.read_csv(tmp_path / "t.csv")["a_b"].tolist()[0] == frame["a_b"][0]
    assert escape_latex("#$<>") == r"\#\$\textless{}\textgreater{}"


def test_the_page_of_a_table_shows_its_cells_and_reads_nothing_else(tmp_path):
    frame = pd.DataFrame({"<b>": ["<script>alert(1)</script>", "a & b"], "tau": ["1.42 [1.31, 1.55]", None]})
    write_all(frame, tmp_path / "t.csv", 'a "note" <i>')
    page = (tmp_path / "t.html").read_text()
    tree = ElementTree.fromstring(re.sub(r"<(!DOCTYPE|meta)[^>]*>", "", page))
    assert [cell.text for cell in tree.iter("th")] == ["<b>", "tau"]
    assert [cell.text for cell in tree.iter("td")] == [*frame.iloc[0], "a & b", "-"]
    assert [cell.get("class") for cell in tree.iter("td")] == [None, "number", None, None]
    assert [note.text for note in tree.iter("p")] == ['a "note" <i>']
    assert {element.tag for element in tree.iter()} <= set(
        ["html", "head", "style", "body", "table", "thead", "tbody", "tr", "th", "td", "p"]
    )
    assert not re.search(r"https?:|url\(|src=|href=", page)


def test_interval_text():
    row = {"value": 0.125, "low": -0.5, "high": 1.0}
    assert interval_text(row) == "0.12 [-0.50, 1.00]"
    assert interval_text(row, 1, signed=True) == "+0.1 [-0.5, +1.0]"
    assert interval_text(row | {"low": float("nan")}) == "0.12"
