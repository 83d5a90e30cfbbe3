"""D-32: a comparison is controlled if starts and data orders are equal and only the objective differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftpool.analysis.controlled import controlled
from draftpool.artefacts import write_json

CFG = {
    "drafters": [
        {"name": "one-s0", "recipe": "one", "seed": 0},
        {"name": "two-s0", "recipe": "two", "seed": 0},
        {"name": "one-s1", "recipe": "one", "seed": 1},
    ],
    "compare": [{"a": "one", "b": "two"}],
}


def folder(root: Path, name: str, start: str, order: str, **resolved) -> Path:
    path = root / name
    path.mkdir()
    write_json(path / "provenance.json", {"initial_parameters": start, "data_order": order})
    (path / "resolved.yaml").write_text(yaml.safe_dump(resolved))
    return path


@pytest.mark.parametrize(
    ("start", "order", "steps", "same_start", "same_order", "differs", "fair"),
    [
        ("a", "o", 5, True, True, "objective", True),
        ("b", "o", 5, False, True, "objective", False),
        ("a", "p", 5, True, False, "objective", False),
        ("a", "o", 6, True, True, "objective steps", False),
    ],
)
def test_d32_hashes_and_configurations_decide(
    start, order, steps, same_start, same_order, differs, fair, tmp_path
):
    training = {
        "one-s0": folder(tmp_path, "one-s0", "a", "o", objective="dpace", steps=5),
        "two-s0": folder(tmp_path, "two-s0", start, order, objective="dflash", steps=steps),
    }
    (row,) = controlled(CFG, training).to_dict("records")
    assert (row["a"], row["b"], row["seed"]) == ("one", "two", 0)
    assert (row["same_start"], row["same_order"], row["differs"], row["controlled"]) == (
        same_start,
        same_order,
        differs,
        fair,
    )
