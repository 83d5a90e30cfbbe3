"""Verdicts on claims: where intervals lie, which rows they come from, false alarms under shuffled labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from draftpool.analysis.bootstrap import Interval, Resampling
from draftpool.analysis.claims import Expected, judge, judge_claims, read_claims
from draftpool.artefacts import write_json
from draftpool.errors import DraftpoolError

REPOSITORY = Path(__file__).resolve().parents[2]
RESAMPLING = Resampling(n_resamples=400)


def interval(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high, 20, "BCa")


@pytest.mark.parametrize(
    ("expected", "low", "high", "verdict"),
    [
        ({"above": 0.0}, 0.1, 0.3, "reproduced"),
        ({"above": 0.0}, -0.3, -0.1, "contradicted"),
        ({"above": 0.0}, -0.1, 0.1, "inconclusive"),
        ({"below": 0.03}, -0.1, 0.02, "reproduced"),
        ({"below": 0.03}, 0.04, 0.1, "contradicted"),
        ({"within": [-0.02, 0.02]}, -0.01, 0.01, "reproduced"),
        ({"within": [-0.02, 0.02]}, 0.03, 0.05, "contradicted"),
        ({"within": [-0.02, 0.02]}, -0.05, -0.03, "contradicted"),
        ({"within": [-0.02, 0.02]}, 0.01, 0.05, "inconclusive"),
        ({"above": 0.0}, float("nan"), float("nan"), "inconclusive"),
    ],
)
def test_verdict_follows_the_interval(expected, low, high, verdict):
    assert Expected(**expected).verdict(interval(low, high)) == verdict


def write_queries(folder: Path, columns: dict[str, np.ndarray], headroom: float = 0.2) -> Path:
    """Statistics with rounds of some selectors on one stream."""
    folder.mkdir(parents=True, exist_ok=True)
    frames = [
        pd.DataFrame(
            {"stream": "heldout", "selector": name, "prompt_id": np.arange(len(values)), "rounds": values}
            | {"domain": np.where(np.arange(len(values)) % 2, "odd", "even"), "converged": values / 2}
        )
        for name, values in columns.items()
    ]
    pd.concat(frames).assign(seconds=1.0).to_csv(folder / "replay_queries.csv", index=False)
    row = {"stream": "heldout", "oracle": "best_switching", "metric": "headroom", "value": headroom}
    pd.DataFrame([row]).to_csv(folder / "headroom.csv", index=False)
    return folder


def claim(expect: dict, **test) -> object:
    test = {"kind": "selectors", "a": "a", "b": "b"} | test
    raw = {"id": "x", "paper": "P", "statement": "s", "test": test, "expect": expect, "about": "selection"}
    return read_claims([raw])[0]


def test_selectors_are_paired_by_query(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.uniform(10, 60, 40)
    stats = write_queries(tmp_path, {"a": base * 0.9 + rng.normal(0, 0.5, 40), "b": base})
    row = judge(claim({"below": 0.0}), stats, RESAMPLING)
    assert (
        row["verdict"] == "reproduced" and row["effect"] == pytest.approx(-0.1, abs=0.01) and row["n"] == 40
    )
    # Queries differ far more than selectors do: unpaired totals could not tell.
    assert row["high"] - row["low"] < 0.03
    assert judge(claim({"above": 0.0}), stats, RESAMPLING)["verdict"] == "contradicted"
    assert judge(claim({"below": 0.0}, b="absent"), stats, RESAMPLING)["verdict"] == "not judged here"
    assert judge(claim({"below": 0.0}, stream="other"), stats, RESAMPLING)["verdict"] == "not judged here"


def test_no_headroom_no_verdict_about_selection(tmp_path):
    base = np.linspace(10, 60, 30)
    stats = write_queries(tmp_path, {"a": base * 0.9, "b": base}, headroom=0.04)
    row = judge(claim({"below": 0.0}), stats, RESAMPLING)
    assert row["verdict"] == "inconclusive: no headroom" and row["headroom"] == 0.04


def test_one_domain_or_another_measure_may_be_asked_for(tmp_path):
    base = np.linspace(10, 60, 30)
    better = np.where(np.arange(30) % 2, base * 0.9, base * 1.1)
    stats = write_queries(tmp_path, {"a": better, "b": base})
    odd, even = (judge(claim({"below": 0.0}, domain=name), stats, RESAMPLING) for name in ("odd", "even"))
    assert odd["effect"] == pytest.approx(-0.1) and odd["verdict"] == "reproduced" and odd["n"] == 15
    assert even["effect"] == pytest.approx(0.1) and even["verdict"] == "contradicted"
    rounds = judge(claim({"below": 0.0}), stats, RESAMPLING)
    converged = judge(claim({"below": 0.0}, measure="converged"), stats, RESAMPLING)
    assert converged["unit"].endswith("converged") and converged["effect"] == pytest.approx(rounds["effect"])


def test_shuffled_labels_give_few_false_alarms(tmp_path):
    """Whose rounds are whose is a coin toss per query: the interval excludes 0 in about 5 % of the studies."""
    rng = np.random.default_rng(1)
    alarms = 0
    for study in range(200):
        pair = rng.uniform(10, 60, (24, 1)) * rng.normal(1.0, 0.1, (24, 2))
        swapped = np.where(rng.random((24, 1)) < 0.5, pair, pair[:, ::-1])
        stats = write_queries(tmp_path / str(study), {"a": swapped[:, 0], "b": swapped[:, 1]})
        alarms += judge(claim({"below": 0.0}), stats, RESAMPLING)["verdict"] != "inconclusive"
    assert 2 <= alarms <= 24


def test_recipes_are_compared_on_the_seeds_they_share(tmp_path):
    drafters = [("a-s0", "a", 0), ("a-s1", "a", 1), ("b-s0", "b", 0)]
    pd.DataFrame(drafters, columns=["drafter", "recipe", "seed"]).to_csv(
        tmp_path / "drafters.csv", index=False
    )
    taus = [
        {
            "drafter": drafter,
            "prompt_id": f"{domain}{prompt}",
            "domain": domain,
            "tau": 1.2 + 0.01 * prompt + shift * (2 if domain == "sampled" else 1),
        }
        for drafter, shift in (("a-s0", 0.1), ("a-s1", 9.0), ("b-s0", 0.0))
        for domain in ("code", "sampled")
        for prompt in range(12)
    ]
    (tmp_path / "meta.json").write_text(json.dumps({"domains": ["code"]}))
    pd.DataFrame(taus).to_csv(tmp_path / "tau_prompts.csv", index=False)
    row = judge(claim({"above": 0.05}, kind="recipes"), tmp_path, RESAMPLING)
    assert row["effect"] == pytest.approx(0.1) and row["verdict"] in ("reproduced", "inconclusive")
    sampled = judge(claim({"above": 0.05}, kind="recipes", domain="sampled"), tmp_path, RESAMPLING)
    assert sampled["effect"] == pytest.approx(0.2) and sampled["n"] == 12
    absent = judge(claim({"above": 0.05}, kind="recipes", domain="typos"), tmp_path, RESAMPLING)
    assert absent["verdict"] == "not judged here"
    # A set that was scored with the pool alone, which has neither recipe.
    pool = pd.DataFrame([{"drafter": "p-s0", "prompt_id": "t0", "domain": "typos", "tau": 1.0}])
    pd.concat([pd.DataFrame(taus), pool]).to_csv(tmp_path / "tau_prompts.csv", index=False)
    absent = judge(claim({"above": 0.05}, kind="recipes", domain="typos"), tmp_path, RESAMPLING)
    assert absent["verdict"] == "not judged here"
    assert (
        judge(claim({"above": 0.05}, kind="recipes", b="c"), tmp_path, RESAMPLING)["verdict"]
        == "not judged here"
    )


def test_a_statistic_is_one_row(tmp_path):
    rows = pd.DataFrame(
        {
            "metric": ["m", "n", "n"],
            "value": 0.5,
            "low": 0.45,
            "high": 0.55,
            "n": 9,
            "unit": "u",
            "method": "BCa",
        }
    )
    rows.to_csv(tmp_path / "feedback.csv", index=False)
    test = {"kind": "statistic", "table": "feedback"}
    raw = {"id": "x", "paper": "P", "statement": "s", "expect": {"within": [0.4, 0.6]}}
    one = read_claims([raw | {"test": test | {"where": {"metric": "m"}}}])[0]
    assert judge(one, tmp_path, RESAMPLING)["verdict"] == "reproduced"
    two = read_claims([raw | {"test": test | {"where": {"metric": "n"}}}])[0]
    with pytest.raises(DraftpoolError, match="2 rows fit.*name more columns"):
        judge(two, tmp_path, RESAMPLING)
    none = read_claims([raw | {"test": test | {"where": {"metric": "o"}}}])[0]
    assert judge(none, tmp_path, RESAMPLING)["verdict"] == "not judged here"
    wrong = read_claims([raw | {"test": test | {"where": {"metrik": "m"}}}])[0]
    with pytest.raises(DraftpoolError, match="no column `metrik`"):
        judge(wrong, tmp_path, RESAMPLING)


def test_claims_of_the_repository_are_well_formed_and_written(tmp_path):
    raw = yaml.safe_load((REPOSITORY / "config" / "claims.yaml").read_text())["claims"]
    claims = read_claims(raw)
    assert {claim.paper.split(" ")[0] for claim in claims} == {
        "MetaSD",
        "HedgeSpec",
        "BanditSpec",
        "D-PACE",
        "ours",
    }
    stats = write_queries(tmp_path / "stats", {"ucb_bd": np.arange(10, 30), "ucb_be": np.arange(11, 31)})
    write_json(stats / "meta.json", {"study": "tiny", "confidence": 0.95})
    bootstrap = {"n_resamples": 200, "confidence": 0.95, "seed": 0}
    judge_claims({"claims": raw, "bootstrap": bootstrap}, stats, tmp_path / "claims")
    verdicts = json.loads((tmp_path / "claims" / "claims.json").read_text())
    assert [row["id"] for row in verdicts] == [claim.id for claim in claims]
    judged = {row["id"]: row["verdict"] for row in verdicts if row["verdict"] != "not judged here"}
    assert judged == {"metasd_bd_regret": "reproduced"}
    assert len((tmp_path / "claims" / "claims.md").read_text().splitlines()) == len(claims) + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expect": {"over": 0.0}}, "over"),
        ({"test": {"kind": "selectorz"}}, "selectorz"),
        ({"id": "Not A Name"}, "id"),
    ],
)
def test_malformed_claims_are_told(change, message):
    raw = {"id": "x", "paper": "P", "statement": "s", "test": {"kind": "recipes", "a": "a", "b": "b"}}
    raw |= {"expect": {"above": 0.0}}
    with pytest.raises(DraftpoolError, match=message):
        read_claims([raw | change])
    with pytest.raises(DraftpoolError, match="`x` is there twice"):
        read_claims([raw, raw])


@pytest.mark.parametrize(("name", "selector", "bound"), [
    ("metasd_log_regret", "ucb_bd", 0.5), ("hedgespec_sublinear", "hedgespec", 1.0),
])  # fmt: skip
def test_claims_about_the_growth_of_regret_can_fail(tmp_path, name, selector, bound):
    raw = yaml.safe_load((REPOSITORY / "config" / "claims.yaml").read_text())["claims"]
    own = next(one for one in read_claims(raw) if one.id == name)
    for value, verdict in (
        (bound - 0.2, "reproduced"),
        (bound + 0.3, "contradicted"),
        (bound, "inconclusive"),
    ):
        row = {
            "stream": "heldout",
            "selector": selector,
            "value": value,
            "low": value - 0.1,
            "high": value + 0.1,
        }
        row |= {"n": 80, "unit": "exponent of tokens", "method": "BCa"}
        pd.DataFrame([row]).to_csv(tmp_path / "regret_growth.csv", index=False)
        assert judge(own, tmp_path, RESAMPLING)["verdict"] == verdict


def test_a_claim_about_one_domain_has_that_domain_s_headroom(tmp_path):
    base = np.linspace(10, 60, 30)
    stats = write_queries(tmp_path, {"a": base * 0.9, "generalist": base}, headroom=0.3)
    rows = pd.read_csv(stats / "replay_queries.csv")
    rows["switching_rounds"] = np.where(rows["domain"] == "odd", rows["rounds"] / 1.02, rows["rounds"] / 2)
    rows.to_csv(stats / "replay_queries.csv", index=False)
    odd, even = (
        judge(claim({"below": 0.0}, b="generalist", domain=name), stats, RESAMPLING)
        for name in ("odd", "even")
    )
    assert odd["headroom"] == pytest.approx(0.02) and odd["verdict"] == "inconclusive: no headroom"
    assert even["headroom"] == pytest.approx(1.0) and even["verdict"] == "reproduced"
    assert judge(claim({"below": 0.0}, b="generalist"), stats, RESAMPLING)["headroom"] == 0.3
