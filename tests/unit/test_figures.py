"""Figures are drawn from tidy CSVs alone, in the same bytes each time."""

import importlib
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import synthetic

from draftpool.analysis.stats import compute_stats
from draftpool.analysis.tidy import read_tidy, recipe_rows
from draftpool.errors import DraftpoolError
from draftpool.figures import FIGURES, style
from draftpool.figures.ablations import on_common_seeds, series

CAPTIONS = Path(__file__).parents[2] / "workflow" / "report"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Statistics of a study with live decoding, and of one with sweeps only."""
    made = {}
    for name, live in (("live", True), ("sweeps", False)):
        cfg = synthetic.study(["code", "maths"], specialists=live, sweeps=not live, n_resamples=100)
        if not live:
            cfg["pool"] = []
        folder = tmp_path_factory.mktemp(name)
        inputs = synthetic.write_study(folder, cfg, prompts=3, length=20, live=live)
        compute_stats(**inputs, out=folder / "stats")
        made[name] = folder / "stats"
    return made


def draw(name: str, stats: Path, out: Path) -> None:
    importlib.import_module(f"draftpool.figures.{name}").draw(stats, out)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_as_png_and_pdf(name, folders, tmp_path):
    stats = folders["sweeps" if FIGURES[name] == "sweeps" else "live"]
    draw(name, stats, tmp_path / f"{name}.png")
    image = matplotlib.image.imread(tmp_path / f"{name}.png")
    assert image.shape[1] >= 900
    assert np.ptp(image) > 0.5
    assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{name}.pdf", f"{name}.png"]


def test_the_same_data_give_the_same_bytes(folders, tmp_path):
    for folder in ("one", "two"):
        draw("objectives", folders["live"], tmp_path / folder / "a.png")
    for suffix in ("png", "pdf"):
        one, two = ((tmp_path / folder / f"a.{suffix}").read_bytes() for folder in ("one", "two"))
        assert one == two


@pytest.mark.parametrize("name", [name for name, needs in FIGURES.items() if needs != "scored"])
def test_a_figure_without_its_data_says_so_and_leaves_nothing(name, folders, tmp_path):
    stats = folders["live" if FIGURES[name] == "sweeps" else "sweeps"]
    with pytest.raises(DraftpoolError):
        draw(name, stats, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_the_heat_map_grows_with_the_number_of_drafters(folders, tmp_path):
    heights = []
    for study in ("live", "sweeps"):
        draw("heatmap_tau", folders[study], tmp_path / f"{study}.png")
        heights.append(matplotlib.image.imread(tmp_path / f"{study}.png").shape[0])
    assert heights[1] > 2 * heights[0]


def test_sweeps_are_joined_by_their_base(folders):
    recipes = recipe_rows(read_tidy(folders["sweeps"], "drafters"))
    assert series(recipes, "alpha")["dpace"]["alpha"].tolist() == [0.0, 0.3, 0.5, 0.7, 0.9]
    assert series(recipes, "block_size")["dflash"]["block_size"].tolist() == [4, 8, 12, 16]
    assert set(series(recipes, "n_layers")) == {"dpace", "dflash"}
    assert series(recipes, "clip")["dpace"]["clip"].tolist() == [10.0, float("inf")]


def test_swept_settings_are_compared_on_the_seeds_they_share(folders):
    drafters, taus = read_tidy(folders["sweeps"], "drafters"), read_tidy(folders["sweeps"], "tau")
    runs = taus[(taus["level"] == "run") & (taus["metric"] == "tau") & (taus["scope"] == "mean")]
    line = on_common_seeds(series(recipe_rows(drafters), "alpha")["dpace"], drafters, runs)
    by_run = runs.set_index("drafter")["value"]
    # The base has two seeds, the variants have seed 0 only.
    assert (
        line.set_index("alpha")["value"][0.5]
        == by_run["generalist_dpace-s0"]
        != by_run["generalist_dpace-s1"]
    )
    assert line.set_index("alpha")["value"][0.3] == by_run["alpha_30-s0"] and (line["n"] > 0).all()


def test_every_figure_and_table_has_a_caption_and_nothing_else_has():
    from draftpool.tables import TABLES

    further = {"workflow", "claims", "provenance"}
    assert {path.stem for path in CAPTIONS.glob("*")} == {*FIGURES, *TABLES, *further}
    for name in (*FIGURES, *TABLES):
        assert len((CAPTIONS / f"{name}.rst").read_text().strip()) > 80, name


def test_labels_and_families():
    assert style.run_label("generalist_dpace-s0") == "generalist D-PACE s0"
    assert style.selector_label("fixed:a_b-s1", "a_b-s1") == "a b s1 (one for all)"
    assert style.selector_label("my_selector") == "my selector"
    kinds = [style.family(name) for name in ("fixed:x", "plain", "random", "best_fixed_query", "ucb_bd")]
    assert kinds == ["fixed drafter", "plain", "no learning", "oracle", "learner"]


def test_figures_and_tables_never_load_torch():
    names = [f"draftpool.figures.{name}" for name in FIGURES] + ["draftpool.tables.dpace_table"]
    code = (
        f"import sys, importlib; [importlib.import_module(n) for n in {names}]; print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
