"""The report of a finished study, clicked through in a browser that can reach nothing."""

from __future__ import annotations

import zipfile

import pandas as pd
import pytest
from smoke_study import REPOSITORY, run

from draftpool.artefacts import read_json
from draftpool.figures import FIGURES
from draftpool.tables import TABLES

# Without selenium there is nothing to click with.
report_browser = pytest.importorskip("report_browser", exc_type=ImportError)
ReportBrowser = report_browser.ReportBrowser
pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(bool(report_browser.missing()), reason=report_browser.missing() or "all is there"),
]

CATEGORIES = ["Claims", "Figures", "Provenance", "Tables"]
FIGURES_SHOWN = {name.replace("_", " "): name for name, part in FIGURES.items() if part != "sweeps"}
TABLES_SHOWN = {name.removesuffix("_table").replace("_", " "): name for name in TABLES}
ROWS = "return document.querySelectorAll('tbody tr').length"


@pytest.fixture(scope="module")
def pages(study):
    """The report as an archive that is unpacked, and as a single page."""
    for name in ("report.zip", "report.html"):
        run(study, "--cores", "2", "--report", name)
    with zipfile.ZipFile(study / "report.zip") as archive:
        archive.extractall(study / "unpacked")
    return {"zip": study / "unpacked/report/report.html", "html": study / "report.html"}


@pytest.fixture
def browser(pages, tmp_path):
    """The unpacked report; afterwards no error stands on the console and nothing was asked for outside."""
    with ReportBrowser(pages["zip"], tmp_path / "profile") as opened:
        opened.wait(lambda _: "RESULTS" in opened.find("#app")[0].text)
        yield opened
        assert opened.errors() == [] and opened.outside() == []


def words(name: str) -> str:
    """The first words of a caption as they are shown, free of markup."""
    return " ".join((REPOSITORY / f"workflow/report/{name}.rst").read_text().replace("`", "").split())[:60]


def test_the_home_page_says_what_the_study_is(browser):
    shown = browser.find("#app")[0].text
    assert "Study smoke of draftpool" in shown
    assert all(name in shown for name in CATEGORIES)
    assert browser.wait(lambda _: browser.find("#app svg")), "no graph of the rules"


def test_every_figure_is_shown_from_its_top_and_has_its_caption(browser, study):
    assert browser.open_category("Figures") == sorted(FIGURES_SHOWN)
    sources = set()
    for label, name in FIGURES_SHOWN.items():
        browser.show(label)
        width, height, source = browser.shown_image(name)
        assert width >= 900 and height > 200, name
        top = browser.driver.execute_script(
            "return document.querySelector('#app .p-3 > img').getBoundingClientRect().top"
        )
        assert top >= 0, f"the top of {name} cannot be scrolled to"
        sources.add(source)
        assert browser.caption(label, "Figures").startswith(words(name)), name
    assert len(sources) == len(FIGURES_SHOWN)


def test_every_table_is_shown_with_its_rows_and_has_its_caption(browser, study):
    assert browser.open_category("Tables") == sorted(TABLES_SHOWN)
    for label, name in TABLES_SHOWN.items():
        browser.show(label)
        browser.in_frame(f"return location.href.endsWith('{name}.html')")
        frame = pd.read_csv(study / f"results/smoke/tables/{name}.csv")
        assert browser.in_frame(ROWS) == len(frame), name
        heads = "return [...document.querySelectorAll('th')].map(cell => cell.textContent)"
        assert browser.in_frame(heads) == list(frame.columns)
        assert browser.caption(label, "Tables").startswith(words(name)), name


def test_claims_and_provenance_are_shown(browser, study):
    (label,) = browser.open_category("Claims")
    browser.show(label)
    assert browser.in_frame(ROWS) == len(read_json(study / "results/smoke/claims/claims.json"))
    assert browser.caption(label, "Claims").startswith("Published claims of config/claims.yaml")
    (label,) = browser.open_category("Provenance")
    browser.show(label)
    told = browser.in_frame("return document.querySelector('pre').textContent")
    for kind in ("targets", "prompts", "drafters"):
        for path in (study / "results" / kind).iterdir():
            assert f"results/{kind}/{path.name}" in told
    assert "changed since" not in told and "[missing]" not in told


def test_the_single_page_shows_figures_and_tables_too(pages, tmp_path):
    with ReportBrowser(pages["html"], tmp_path / "profile") as browser:
        browser.wait(lambda _: "RESULTS" in browser.find("#app")[0].text)
        browser.open_category("Figures")
        browser.show("selectors")
        width, _, source = browser.shown_image("")
        assert width >= 900 and source.startswith("data:image/png")
        browser.open_category("Tables")
        browser.show("drafters")
        assert browser.in_frame(ROWS) == len(
            pd.read_csv(pages["html"].parent / "results/smoke/tables/drafters_table.csv")
        )
        assert browser.errors() == [] and browser.outside() == []


def test_what_the_browser_would_complain_about_is_seen(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>throw new Error("broken")</script>')
    with ReportBrowser(page, tmp_path / "profile") as browser:
        browser.wait(lambda _: browser.outside() and any("broken" in line for line in browser.errors()))
        assert browser.outside() == ["http://127.0.0.1:9/x.png"]
