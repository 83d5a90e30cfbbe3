"""docs/scaling.md says what `draftpool plan` prints, and nothing else."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
NUMBER = re.compile(r"(?<![\w.,])(\d[\d.]*)(?: (TB|GB|GPU hours|CPU hours|s\b|jobs\b|files\b))")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fill_scaling", DOCS / "fill_scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_what_the_commands_print(script):
    text = (DOCS / "scaling.md").read_text(encoding="utf-8")
    assert len(script.BLOCK.findall(text)) == 5
    assert script.filled(text) == text, "run `python docs/fill_scaling.py`"


def test_every_quantity_of_the_text_stands_in_a_table(script):
    text = (DOCS / "scaling.md").read_text(encoding="utf-8")
    tables = " ".join(
        found[0] for found in re.findall(r"<!-- plan: .+? -->\n(.*?)(<!-- end -->)", text, re.DOTALL)
    )
    printed = set(re.split(r"[^\w.]+", tables))
    prose = script.BLOCK.sub("", text)
    quoted = NUMBER.findall(prose)
    assert len(quoted) > 20
    for number, unit in quoted:
        assert number in printed, f"{number} {unit}"
