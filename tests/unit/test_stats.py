"""The statistics stage on synthetic studies."""

import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy.stats import rankdata, spearmanr
from synthetic import OUTSIDE
from test_metrics import naive_rounds

from draftpool.analysis import comparisons, live, surrogate, training_logs
from draftpool.analysis.bootstrap import Resampling
from draftpool.analysis.metrics import truncate, walk
from draftpool.analysis.stats import compute_stats
from draftpool.artefacts import read_table, write_table
from draftpool.errors import DraftpoolError

DOMAINS = ["code", "maths", "qa"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Inputs and statistics of a small study with live decoding."""
    folder = tmp_path_factory.mktemp("study")
    inputs = synthetic.write_study(folder, synthetic.study(DOMAINS), prompts=6, length=32)
    compute_stats(**inputs, out=folder / "stats")
    return inputs, folder / "stats"


def test_d26_the_summary_has_the_promised_names_with_interval_n_and_unit(made):
    _, stats = made
    text = (stats / "summary.json").read_text()
    assert "NaN" not in text
    summary = json.loads(text)
    for name in (
        "tau/generalist_dpace/mean",
        "tau/generalist_dflash/mean",
        "tau/specialist_maths-s0/maths",
        "headroom/mixed",
        "headroom/heldout",
        "speedup/ucb_bd/mixed",
        "speedup/best_fixed/mixed",
        "mat/normal_hedge/mixed",
        "regret/exp3/mixed",
        "lossless/float32/mismatches",
        "lossless/bfloat16/rate",
        "overhead/dpace_step",
        "time/train_drafter",
    ):
        assert set(summary[name]) == {"value", "low", "high", "n", "unit"}, name
        entry = summary[name]
        if not name.startswith(("time/", "lossless/float32")):
            assert entry["low"] <= entry["value"] <= entry["high"], name
    assert summary["time/train_drafter"]["value"] == 25.0
    assert summary["lossless/bfloat16/rate"]["value"] == pytest.approx(6 / 400)
    assert summary["speedup/best_fixed/mixed"]["value"] == max(
        entry["value"] for name, entry in summary.items() if name.startswith("speedup/fixed:")
    )


def test_tau_of_runs_and_recipes_equals_a_naive_walk(made):
    inputs, stats = made
    table = read_table(inputs["acceptance"][0])
    tokens, rounds = {}, {}
    for (drafter, prompt), own in table.groupby(["drafter", "prompt_id"]):
        tokens[prompt] = own["position"].max() + 1
        rounds[drafter, prompt] = naive_rounds(own, drafter)
    prompts = {domain: [p for p in tokens if p.startswith(domain)] for domain in DOMAINS}

    def naive(names: list[str], domain: str) -> float:
        own = prompts[domain]
        return sum(tokens[p] for p in own) / sum(np.mean([rounds[name, p] for name in names]) for p in own)

    taus = pd.read_csv(stats / "tau.csv")
    taus = taus[taus["metric"] == "tau"].set_index(["level", "drafter", "scope"])["value"]
    runs = ["generalist_dpace-s0", "generalist_dpace-s1"]
    for domain in DOMAINS:
        assert taus["run", runs[0], domain] == pytest.approx(naive(runs[:1], domain))
        assert taus["recipe", "generalist_dpace", domain] == pytest.approx(naive(runs, domain))
    assert taus["recipe", "generalist_dpace", "mean"] == pytest.approx(
        np.mean([naive(runs, d) for d in DOMAINS])
    )
    compare = pd.read_csv(stats / "compare.csv").set_index(["a", "scope"])
    wanted = taus["recipe", "generalist_dpace", "mean"] - taus["recipe", "generalist_dflash", "mean"]
    assert compare.loc[("generalist_dpace", "mean"), "value"] == pytest.approx(wanted)
    spread = pd.read_csv(stats / "tau_seeds.csv").set_index(["recipe", "scope"])
    assert spread.loc[("generalist_dpace", "mean"), "min"] == min(taus["run", run, "mean"] for run in runs)


def test_d23_d25_speedup_mat_and_time_split_equal_naive_totals(made):
    inputs, stats = made
    folder = inputs["decodes"][1]
    sequences, steps = read_table(folder / "sequences.parquet"), read_table(folder / "steps.parquet")
    own = sequences[sequences["selector"] == "ucb_bd"]
    rows = pd.read_csv(stats / "selectors.csv")
    rows = rows[(rows["dtype"] == "bfloat16") & (rows["selector"] == "ucb_bd") & (rows["scope"] == "all")]
    value = rows.set_index("metric")["value"]
    assert value["speedup"] == pytest.approx(own["plain_wall_time"].sum() / own["wall_time"].sum())
    assert value["mat"] == pytest.approx((own["n_tokens"] - 1).sum() / own["rounds"].sum())
    end = (own["plain_wall_time"] + own["t_prefill"]).sum() / (own["wall_time"] + own["t_prefill"]).sum()
    assert value["speedup_end_to_end"] == pytest.approx(end)
    split = pd.read_csv(stats / "time_split.csv")
    split = split[(split["dtype"] == "bfloat16") & (split["selector"] == "ucb_bd")].set_index("part")
    decoded = (own["n_tokens"] - 1).sum()
    draft = steps.loc[steps["selector"] == "ucb_bd", "t_draft"].sum()
    assert split.loc["draft", "value"] == pytest.approx(1000 * draft / decoded)
    assert split["value"].sum() == pytest.approx(1000 * own["wall_time"].sum() / decoded)
    assert split["share"].sum() == pytest.approx(1)


def test_arm_shares_average_seeds_and_sum_to_one(made):
    _, stats = made
    shares = pd.read_csv(stats / "arm_shares.csv")
    assert not shares["selector"].str.startswith("fixed:").any()
    sums = shares.groupby(["dtype", "selector", "domain"])["value"].sum()
    assert np.allclose(sums, 1)


def test_d28_live_rounds_agree_with_the_acceptance_table(made):
    inputs, stats = made
    rows = pd.read_csv(stats / "agreement.csv")
    exact = rows[rows["dtype"] == "float32"]
    assert len(exact) == len(inputs["cfg"]["drafters"])
    assert (exact["max_difference_rounds"] == 0).all() and (exact["other_text"] == 0).all()
    assert (exact["n"] == 18).all() and (exact["agreeing"] == 18).all()


def test_d28_a_shorter_live_limit_is_cut_and_still_agrees_and_a_difference_shows():
    cfg = synthetic.study(["code"], specialists=False)
    table = synthetic.acceptance_table(cfg, prompts=3, length=30)
    wanted = table[["prompt_id", "repeat"]].drop_duplicates().assign(n_tokens=12)
    _, sequences = synthetic.decode(cfg, truncate(table, wanted))
    rows = live.agreement(sequences, table)
    assert (rows["shortened"] == 3).all()
    assert (rows["max_difference_rounds"] == 0).all()
    sequences.loc[sequences["selector"] == "fixed:generalist_long-s0", "rounds"] += 1
    changed = live.agreement(sequences, table).set_index("drafter")["max_difference_rounds"]
    assert changed["generalist_long-s0"] == 1


def test_half_precision_is_compared_while_its_text_is_the_same():
    cfg = synthetic.study(["code"], specialists=False)
    table = synthetic.acceptance_table(cfg, prompts=4, length=20)
    _, exact = synthetic.decode(cfg, table)
    half = exact.assign(dtype="bfloat16")
    name = "fixed:generalist_long-s0"
    own = half.index[half["selector"] == name]
    half.loc[own[0], "sha256"] = "another text"
    half.loc[own[1], "rounds"] += 2
    rows = live.agreement(pd.concat([exact, half], ignore_index=True), table).set_index(["dtype", "drafter"])
    found = rows.loc[("bfloat16", "generalist_long-s0")]
    assert found[["n", "other_text", "agreeing", "max_difference_rounds"]].tolist() == [3, 1, 2, 2]
    assert rows.loc[("float32", "generalist_long-s0"), "agreeing"] == 4


def test_d8_statistics_refuse_another_text_in_float32_but_count_it_in_bfloat16(made, tmp_path):
    inputs, _ = made
    for dtype, folder in zip(("float32", "bfloat16"), inputs["decodes"], strict=True):
        sequences = read_table(folder / "sequences.parquet")
        sequences.loc[0, ["matches_plain", "top2_margin"]] = [False, 0.125]
        write_table(tmp_path / dtype / "sequences.parquet", sequences)
        write_table(tmp_path / dtype / "steps.parquet", read_table(folder / "steps.parquet"))
    with pytest.raises(DraftpoolError, match="differ from plain decoding in float32"):
        compute_stats(**inputs | {"decodes": [tmp_path / "float32"]}, out=tmp_path / "stats")
    assert not (tmp_path / "stats").exists()
    _, sequences = live.read_decodes([tmp_path / "bfloat16"])
    counted = live.mismatches(sequences)
    assert counted["mismatches"].sum() == 1
    assert counted["max_top2_margin"].max() == 0.125


def test_d38_full_blocks_are_counted_per_drafter(made):
    inputs, stats = made
    table = read_table(inputs["acceptance"][0])
    table = table[table["domain"].isin(inputs["cfg"]["domains"])]
    found = pd.read_csv(stats / "drafters.csv").set_index("drafter")["censored_share"]
    for drafter, own in table.groupby("drafter"):
        assert found[drafter] == pytest.approx(own["censored"].mean())


def test_what_no_drafter_was_trained_on_stands_apart(made):
    """Neither means over domains nor the stream of held-out prompts hold it; it has rows of its own."""
    inputs, stats = made
    table = read_table(inputs["acceptance"][0])
    outside = table[table["domain"] == OUTSIDE]
    walked = walk(outside)
    rows = pd.read_csv(stats / "tau_sets.csv").set_index("drafter")
    assert set(rows.index) == set(inputs["cfg"]["pool"]) and set(rows["set"]) == {OUTSIDE}
    for drafter, own in walked.groupby("drafter"):
        assert rows.loc[drafter, "value"] == pytest.approx(own["tokens"].sum() / own["rounds"].sum())
    assert OUTSIDE not in set(pd.read_csv(stats / "tau.csv")["scope"])
    prompts = pd.read_csv(stats / "tau_prompts.csv")
    assert prompts[prompts["domain"] == OUTSIDE]["prompt_id"].nunique() == 3
    headroom = pd.read_csv(stats / "headroom.csv").set_index(["stream", "oracle", "metric"])
    assert headroom.loc[(OUTSIDE, "best_switching", "headroom"), "n"] == 3
    assert headroom.loc[("heldout", "best_switching", "headroom"), "n"] == 6 * len(DOMAINS)
    generalist = walked[walked["drafter"] == inputs["cfg"]["generalist"]]["rounds"].sum()
    tau = walked[walked["drafter"] == inputs["cfg"]["generalist"]]["tokens"].sum() / generalist
    assert headroom.loc[(OUTSIDE, "generalist", "tau"), "value"] == pytest.approx(tau)


def test_specialists_are_compared_at_home_and_abroad(made):
    _, stats = made
    rows = pd.read_csv(stats / "specialists.csv").set_index(["home", "scope"])
    for domain in DOMAINS:
        assert rows.loc[(domain, "home"), "low"] > 0
        assert rows.loc[(domain, "abroad"), "high"] < 0
        gap = rows.loc[(domain, "home"), "tau"] - rows.loc[(domain, "home"), "generalist_tau"]
        assert rows.loc[(domain, "home"), "value"] == pytest.approx(gap)


def test_surrogates_and_rank_correlations_equal_naive_ones():
    gamma = pd.Series([[0.5, 0.2, 0.1], [0.9], []])
    product, total = surrogate.surrogates(gamma)
    assert product == pytest.approx([0.5 + 0.1 + 0.01, 0.9, 0])
    assert total == pytest.approx([0.8, 0.9, 0])
    table = synthetic.acceptance_table(synthetic.study(["code", "maths"], specialists=False), prompts=6)
    rows, points = surrogate.rank_correlations(table, Resampling(200))
    own = points[points["drafter"] == "generalist_long-s0"]
    value = rows.set_index(["drafter", "level", "surrogate"])["value"]
    for name in ("product", "sum"):
        wanted = spearmanr(own[name], own["length"]).statistic
        assert value["generalist_long-s0", "prompt", name] == pytest.approx(wanted)
    anchors, _ = surrogate.per_prompt_surrogates(table)
    one = anchors[anchors["drafter"] == "generalist_long-s0"]
    wanted = np.corrcoef(rankdata(one["product"]), rankdata(one["length"]))[0, 1]
    assert value["generalist_long-s0", "anchor", "product"] == pytest.approx(wanted)


def test_training_statistics_find_overhead_and_clipping():
    cfg = synthetic.study(["code"], specialists=False)
    logs = {entry["name"]: synthetic.training_log(entry, i) for i, entry in enumerate(cfg["drafters"])}
    drafters = comparisons.drafter_table(cfg["drafters"])
    found = training_logs.dpace_overhead(logs, drafters, Resampling(300))
    assert found.low < 0.02 < found.high + 0.002
    assert found.n == 4 * (40 - training_logs.WARM_UP_STEPS)
    only = drafters[drafters["objective"] == "dpace"]
    assert training_logs.dpace_overhead(logs, only, Resampling(300)) is None
    summary = training_logs.training_summary(logs).set_index("drafter")
    assert (
        summary.loc["generalist_dpace-s0", "clipped_share"] == logs["generalist_dpace-s0"]["clipped"].mean()
    )
    dynamics = training_logs.training_dynamics(logs, bins=10)
    long = dynamics[(dynamics["drafter"] == "generalist_long-s0") & (dynamics["slot"] == 2)]
    assert len(long) == 10
    assert long["confidence"].iloc[0] == pytest.approx(
        logs["generalist_long-s0"]["confidence_2"].iloc[:12].mean()
    )


def test_a_study_without_live_decoding_pool_or_comparisons(tmp_path):
    cfg = synthetic.study(["code"], specialists=False, n_resamples=100) | {"pool": [], "compare": []}
    inputs = synthetic.write_study(tmp_path, cfg, prompts=3, length=20, live=False)
    folders = list(inputs["training"].values())
    compute_stats(
        **inputs | {"lossless": None, "benchmarks": [], "training": folders}, out=tmp_path / "stats"
    )
    names = {file.name for file in (tmp_path / "stats").iterdir()}
    assert {"tau.csv", "summary.json", "meta.json", "surrogate.csv", "training.csv"} <= names
    assert not names & {"selectors.csv", "headroom.csv", "regret.csv", "compare.csv", "times.csv"}
    summary = json.loads((tmp_path / "stats" / "summary.json").read_text())
    assert all(math.isfinite(entry["value"]) for entry in summary.values())


def test_bad_inputs_end_in_one_line(tmp_path):
    cfg = synthetic.study(["code"], specialists=False, n_resamples=100)
    inputs = synthetic.write_study(tmp_path, cfg, prompts=2, length=12, live=False)
    extra = cfg | {"drafters": [*cfg["drafters"], synthetic.drafter("unscored")]}
    with pytest.raises(DraftpoolError, match="never scored: unscored-s0"):
        compute_stats(**inputs | {"cfg": extra}, out=tmp_path / "stats")
    with pytest.raises(DraftpoolError, match="no acceptance table"):
        compute_stats(**inputs | {"acceptance": []}, out=tmp_path / "stats")
    with pytest.raises(DraftpoolError, match="training log missing"):
        compute_stats(
            **inputs | {"training": {"generalist_dpace-s0": tmp_path / "none"}}, out=tmp_path / "stats"
        )
    with pytest.raises(DraftpoolError, match="not in the acceptance table"):
        wrong = cfg | {"compare": [{"a": "generalist_dpace", "b": "nobody"}]}
        compute_stats(**inputs | {"cfg": wrong}, out=tmp_path / "stats")
    assert not (tmp_path / "stats").exists()


def test_statistics_never_load_torch_or_matplotlib():
    code = "import sys, draftpool.analysis.stats; print({'torch', 'matplotlib'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
