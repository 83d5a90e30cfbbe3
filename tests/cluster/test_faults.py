"""The small study under faults at random moments ends with the tables of a study that was never disturbed.

The short form hits the stages that keep scratch results, and a light one. `DRAFTPOOL_FAULTS=full` hits every stage
that lasts, at least 20 times in all; `DRAFTPOOL_FAULT_SEED` chooses other moments.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from faults import SmallDisk, contents, disturb

pytestmark = [pytest.mark.slow, pytest.mark.network]

REPOSITORY = Path(__file__).resolve().parents[2]
SHORT = Counter(generate_responses=1, train_drafter=2, score_pool=1, decode_live=1, compute_stats=1)
FULL = Counter(
    fetch_target=1,
    prepare_prompts=1,
    prepare_set=1,
    generate_responses=3,
    make_drafter=2,
    train_drafter=5,
    check_lossless=1,
    score_pool=2,
    train_router=1,
    profile_costs=1,
    profile_decode=1,
    decode_live=2,
    replay_selectors=2,
    compute_stats=1,
    judge_claims=1,
    draw_figure=2,
    write_table=2,
)


def command(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "snakemake", "--cores", "2"),
        *("--snakefile", str(REPOSITORY / "Snakefile"), "--directory", str(folder)),
        *("--configfile", str(REPOSITORY / "config/smoke.yaml"), str(REPOSITORY / "tests/small.yaml")),
    ]


@pytest.fixture(scope="module")
def undisturbed(request, tmp_path_factory) -> Path:
    """The same study without faults: the one that Slurm's nodes made, or where there is no Slurm a local one."""
    try:
        return request.getfixturevalue("slurm_study")[0]
    except pytest.skip.Exception:
        folder = tmp_path_factory.mktemp("undisturbed")
        subprocess.run(command(folder), check=True, timeout=1800)
        return folder


def test_d41_d49_faults_at_random_moments_change_no_table(undisturbed, tmp_path):
    full = os.environ.get("DRAFTPOOL_FAULTS") == "full"
    wanted = FULL if full else SHORT
    rng = random.Random(int(os.environ.get("DRAFTPOOL_FAULT_SEED", "1")))
    study = tmp_path / "study"
    study.mkdir()
    with SmallDisk.mounted(study) as disk:
        made = disturb(command(study), wanted, rng, tmp_path / "log", disk)
        print(*made, sep="\n")
        # A job may be over before its moment comes.
        assert len(made) >= (20 if full else 5)
        assert {stage for stage, _, _ in made} <= set(wanted)
        found, expected = contents(study / "results"), contents(undisturbed / "results")
        assert set(found) == set(expected)
        assert [name for name in expected if found[name] != expected[name]] == []
        leftovers = [path for path in study.rglob("*.part") if ".snakemake" not in path.parts]
        assert leftovers == []


def test_without_a_network_a_study_ends_in_one_line_and_goes_on_later(tmp_path):
    """The first run has no network and no cache, the next one has both; only the downloads are asked for."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--net", "true"]).returncode:
        pytest.skip("this machine does not let us cut the network (unshare --net)")
    wanted = "results/prompts"
    environment = os.environ | {"DRAFTPOOL_CACHE": str(tmp_path / "empty")}
    first = [*command(tmp_path), "--until", "prepare_prompts"]
    cut = subprocess.run(
        ["unshare", "--net", *first], env=environment, capture_output=True, text=True, timeout=300
    )
    assert cut.returncode != 0
    lines = [line for line in (cut.stdout + cut.stderr).splitlines() if line.startswith("draftpool: error:")]
    assert lines and all("->" in line and "Traceback" not in line for line in lines), cut.stderr[-3000:]
    assert "Traceback" not in cut.stdout + cut.stderr
    assert not (tmp_path / wanted).exists() or not list((tmp_path / wanted).iterdir())
    subprocess.run(first, check=True, timeout=300)
    assert len(list((tmp_path / wanted).iterdir())) == 2
