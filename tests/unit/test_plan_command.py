"""Prices of `draftpool plan` against a finished run and published steps; what the command prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from draftpool.cli import main
from draftpool.config.load import merge, read_yaml, resolve
from draftpool.config.plan import Plan
from draftpool.errors import DraftpoolError
from draftpool.estimate.command import estimate_study, grown, read_study, whole_study
from draftpool.estimate.counts import count_work
from draftpool.estimate.machines import MEASURED, PUBLISHED, ROOFLINE, Cpu, Gpu, measured, published
from draftpool.estimate.space import space_of
from draftpool.estimate.table import Row, size_text, table_text
from draftpool.estimate.world import World

REPOSITORY = Path(__file__).resolve().parents[2]

# -- prices ----------------------------------------------------------------------------------------------

# Predicted over measured seconds, of every stage and of the whole default study.
FACTOR_OF_A_STAGE, FACTOR_OF_THE_STUDY = 2.1, 1.1


def cpu_study():
    """The default study as it was measured: on a CPU, in both dtypes."""
    raw = read_yaml(REPOSITORY / "config/default.yaml")
    raw = merge(raw, {"device": "cpu", "decode": {"dtypes": ["float32", "bfloat16"]}})
    plan, machine = Plan(resolve(raw)), Cpu()
    return World(plan, machine.lengths, machine.tau(""), {}), machine


def test_predicted_seconds_of_the_default_study_are_near_the_measured_ones():
    world, machine = cpu_study()
    predicted: Counter = Counter()
    for work in count_work(world):
        price = machine.price(work, world.shape)
        assert not price.on_gpu and price.basis == MEASURED
        predicted[work.stage] += price.seconds
    found = measured()["study"]["seconds"]
    for stage, seconds in found.items():
        assert 1 / FACTOR_OF_A_STAGE < predicted[stage] / seconds < FACTOR_OF_A_STAGE, stage
    both = sum(predicted[stage] for stage in found), sum(found.values())
    assert 1 / FACTOR_OF_THE_STUDY < both[0] / both[1] < FACTOR_OF_THE_STUDY


# The default study may have grown a little since it was measured.
GROWN = 0.25


def test_predicted_disk_and_jobs_of_the_default_study_are_the_measured_ones():
    world, machine = cpu_study()
    disk: Counter = Counter()
    jobs: Counter = Counter()
    for work in count_work(world):
        disk[work.stage] += space_of(work, world, False).disk
        jobs[work.stage] += 1
    for stage, size in measured()["study"]["disk"].items():
        assert disk[stage] == pytest.approx(size, rel=GROWN), stage
        assert jobs[stage] == pytest.approx(measured()["study"]["jobs"][stage], rel=GROWN), stage


def test_predicted_calls_and_rows_are_near_those_of_the_tables():
    world, _ = cpu_study()
    works = list(count_work(world))
    calls: Counter = Counter()
    for work in works:
        if work.stage == "decode_live":
            calls[work.detail] += work.counts["calls"]
    told = measured()["study"]
    for dtype, count in told["target_calls"].items():
        assert calls[dtype] == pytest.approx(count, rel=0.15)
    (rows,) = [work.counts["rows"] for work in works if work.stage == "score_pool"]
    assert rows == pytest.approx(told["acceptance_rows"], rel=0.1)


def test_predicted_memory_is_within_a_factor_of_two_of_the_large_stages():
    world, _ = cpu_study()
    host: dict[str, float] = {}
    for work in count_work(world):
        host[work.stage] = max(host.get(work.stage, 0.0), space_of(work, world, False).host)
    large = {stage: size for stage, size in measured()["study"]["memory"].items() if size > 1e9}
    assert len(large) > 5
    for stage, size in large.items():
        assert 0.5 < host[stage] / size < 2, stage


def test_the_published_step_is_priced_as_published():
    told, gpu = published()["training"], Gpu()
    # Two sequences use a quarter of the peak; twelve would need more than there is.
    assert 0.2 < gpu.training_rate / gpu.peak["bfloat16"] < 0.35
    assert 12 / told["sequences"] * gpu.training_rate > gpu.peak["bfloat16"]
    files = [REPOSITORY / "config/paper/qwen3-4b.yaml"]
    rows = {row.stage: row for row in estimate_study(files).rows}
    train = rows["train_drafter block"]
    assert train.basis == PUBLISHED and train.cpu_seconds == 0.0
    three_layers = 2 * 49993 * 12 / told["sequences"] * told["seconds"]
    # Two drafters of three layers as published, two of five, which take more of the draft layers' share.
    assert 2 * three_layers < train.gpu_seconds < 2 * three_layers * 5 / 3 + three_layers * 2


def test_every_row_says_what_it_rests_on_and_totals_are_sums():
    for name in ("qwen3-4b", "qwen3-8b", "llama31-8b", "vicuna-7b"):
        one = estimate_study([REPOSITORY / f"config/paper/{name}.yaml"])
        assert {row.basis for row in one.rows} == {MEASURED, PUBLISHED, ROOFLINE}
        assert one.total.jobs == 1 + sum(row.jobs for row in one.rows)
        assert one.total.disk == pytest.approx(sum(row.disk for row in one.rows))
        assert one.total.device == max(row.device for row in one.rows)
        # What uses a GPU in the workflow is priced on one.
        on_gpu = {row.stage.split()[0] for row in one.rows if row.gpu_seconds}
        assert on_gpu >= {
            "generate_responses",
            "train_drafter",
            "check_lossless",
            "score_pool",
            "decode_live",
        }


def test_more_prompts_take_more_of_what_depends_on_them():
    files = [REPOSITORY / "config/paper/qwen3-8b.yaml"]
    one, ten = (estimate_study(files, times=times) for times in (1, 10))
    assert one.total.jobs == ten.total.jobs
    for a, b in zip(one.rows, ten.rows, strict=True):
        assert a.stage == b.stage
        if a.stage.startswith(("generate", "train_drafter", "score", "decode", "replay")):
            taken = (b.gpu_seconds + b.cpu_seconds) / (a.gpu_seconds + a.cpu_seconds)
            assert taken == pytest.approx(10, rel=0.1), a.stage
    assert grown({"steps": 3, "lr": 0.1, "seeds": 4, "domains": {"a": {"train": 2}}}, 10) == {
        "steps": 30, "lr": 0.1, "seeds": 4, "domains": {"a": {"train": 20}},
    }  # fmt: skip


def test_given_lengths_replace_the_assumed_ones():
    files = [REPOSITORY / "config/paper/qwen3-8b.yaml"]
    one = estimate_study(files, answer_tokens=1000, prompt_tokens=300)
    assert one.assumptions["answer tokens"] == 1000 and one.assumptions["prompt tokens"] == 300
    tokens = 68000 * (300 + 1000 - 1)
    (row,) = [row for row in estimate_study(files).rows if row.stage == "generate_responses bfloat16"]
    (longer,) = [row for row in one.rows if row.stage == "generate_responses bfloat16"]
    assert longer.disk > row.disk and longer.disk > tokens * 5 * 4096 * 2


# -- the command -----------------------------------------------------------------------------------------


def test_an_overlay_alone_is_laid_over_the_default_study(tmp_path, monkeypatch):
    overlay = REPOSITORY / "config/paper/qwen3-8b.yaml"
    default = REPOSITORY / "config/default.yaml"
    assert whole_study([default, overlay]) == [default, overlay]
    monkeypatch.chdir(tmp_path)
    assert [path.resolve() for path in whole_study([overlay])] == [default, overlay]
    assert read_study([overlay]).target.id == read_study([default, overlay]).target.id
    (tmp_path / "mine.yaml").write_text("experiment: mine\n")
    with pytest.raises(
        DraftpoolError, match="config/default.yaml is not here.*--config BASE.yaml OVERLAY.yaml"
    ):
        whole_study([tmp_path / "mine.yaml"])


def test_the_command_prints_the_same_twice_and_as_json(capsys):
    flags = ["plan", "--config", str(REPOSITORY / "config/paper/vicuna-7b.yaml")]
    printed = []
    for more in ([], [], ["--json"]):
        assert main([*flags, *more]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "paper_vicuna_7b" in printed[0]
    told = json.loads(printed[2])
    (study,) = told["studies"]
    (shown,) = [line.split() for line in printed[0].splitlines() if line.startswith("total")]
    # Published rows name whose numbers they are.
    assert (
        "published for check_lossless, decode_live, profile_costs, profile_decode: BanditSpec" in printed[0]
    )
    assert any("BanditSpec" in source for source in study["sources"])
    assert (
        shown[:2] == ["total", str(study["total"]["jobs"])]
        and told["total"]["jobs"] == study["total"]["jobs"]
    )
    bases = {row["basis"] for row in study["rows"]}
    assert bases == {"measured", "published", "roofline"}


def test_several_studies_are_added_up(capsys):
    paper = REPOSITORY / "config/paper"
    flags = [
        "plan",
        "--json",
        "--config",
        str(paper / "qwen3-4b.yaml"),
        "--config",
        str(paper / "qwen3-8b.yaml"),
    ]
    assert main(flags) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["studies"]) == 2
    assert told["total"]["jobs"] == sum(study["total"]["jobs"] for study in told["studies"])
    assert main([flag for flag in flags if flag != "--json"]) == 0
    assert "all studies" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "abacus"], "flag --gpu: unknown GPU `abacus` -> known: a100, h100, h200"),
        (["--shape", "x"], "flag --shape: 'x' is not NAME=FILE"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such configuration file"),
        (
            ["--config", str(REPOSITORY / "tests/workflow/config.yaml")],
            "the shape of `models/tiny` is not known",
        ),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert main(["plan", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_torch_is_not_imported():
    code = (
        "import sys; from draftpool.cli import main; "
        f"assert main(['plan', '--config', {str(REPOSITORY / 'config/paper/qwen3-8b.yaml')!r}]) == 0; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sizes_and_tables_are_readable():
    assert [size_text(size) for size in (427, 1064, 35.1e6, 999.6e9, 2.5e18)] == [
        "427 B", "1.06 kB", "35.1 MB", "1 TB", "2.5e+03 PB",
    ]  # fmt: skip
    row = Row("stage", 2, 3600.0, 0.0, 1800.0, 1e9, 0.0, 3, 1e9, 2e9, MEASURED)
    lines = table_text([row], row + row).splitlines()
    shown = ["stage", "2", "1", "-", "0.5", "1", "GB", "-", "3", "1", "GB", "2", "GB", "measured"]
    assert lines[2].split() == shown and lines[-1].split()[:5] == ["stage", "4", "2", "-", "0.5"]
