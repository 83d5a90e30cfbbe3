"""bench/derive_unit_costs.py reads times, sizes and lengths of a finished study."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

from draftpool.config.load import load
from draftpool.config.plan import Plan

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("derive", REPOSITORY / "bench/derive_unit_costs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plan():
    return Plan(load(REPOSITORY / "config/default.yaml"))


def benchmark(results: Path, stage: str, id: str, seconds: float, megabytes: float) -> None:
    """Write what Snakemake writes of a job, and its artefact."""
    (results / "benchmarks").mkdir(exist_ok=True)
    (results / "benchmarks" / f"{stage}-{id}.tsv").write_text(
        f"s\tmax_rss\tmax_uss\n{seconds}\t9999\t{megabytes}\n"
    )


def test_jobs_are_those_with_a_benchmark_and_an_artefact(script, tmp_path):
    for id, seconds in (("a-000000000001", 3.0), ("a-000000000002", 4.0), ("b-000000000003", 5.0)):
        benchmark(tmp_path, "generate_responses", id, seconds, 100 + seconds)
    for id in ("a-000000000001", "b-000000000003"):
        (tmp_path / "responses" / id).mkdir(parents=True)
        (tmp_path / "responses" / id / "x").write_bytes(bytes(7))
    # The second has no artefact any more, the third is of another study.
    ids = script.found_ids(tmp_path, "generate_responses", {"a"})
    assert ids == ["a-000000000001"]
    both = ["a-000000000001", "b-000000000003"]
    assert script.seconds(tmp_path, "generate_responses", both) == (8.0, 105 * 2**20)
    assert script.size(tmp_path / "responses") == 14


def test_lengths_are_shares_of_the_limits(script, plan, tmp_path):
    folder = tmp_path / "responses" / "code-eval-000000000001"
    folder.mkdir(parents=True)
    rows = {"prompt_ids": [[1] * 10, [1] * 30], "response_ids": [[2] * 4, [2] * 8]}
    pd.DataFrame(rows).to_parquet(folder / "responses.parquet")
    found = script.measured_lengths(tmp_path, plan, [folder.name, "sessions-eval-000000000002"])
    limits = plan.study.responses
    assert (found.answer, found.prompt) == (6, 20)
    assert found.answer_share == pytest.approx(6 / limits.max_new_tokens)
    assert found.prompt_share == pytest.approx(20 / limits.max_prompt_tokens)


def test_tau_is_tokens_over_rounds_of_drafters_alone(script, plan):
    rows = [
        ("plain", 50, 50), ("ucb_bd", 50, 20), ("fixed:eagle-s0", 50, 25), ("fixed:eagle-s0", 10, 5),
        ("fixed:generalist-s0", 30, 20), ("fixed:specialist_sql-s0", 30, 10),
    ]  # fmt: skip
    sequences = pd.DataFrame(rows, columns=["selector", "n_tokens", "rounds"])
    assert script.tau_by_kind(sequences, plan) == {"block": 2.0, "eagle": 2.0}
