"""Results on a shared disk: what docs/storage.md says of each way, on the tiny study."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

NOTHING = Counter()
SHARED = ("persistence", "software-deployment", "sources", "source-cache")
FOLDERS = {"targets", "prompts", "responses", "drafters", "lossless", "scores", "decodes", "costs", "replays"}

missing = [name for name in ("rsync",) if shutil.which(name) is None]
missing += [name for name in ("snakemake_storage_plugin_fs",) if importlib.util.find_spec(name) is None]
needs_plugin = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def plugin(disk: Path) -> list[str]:
    """Flags that let the storage plugin `fs` keep results below a folder."""
    where = ["--default-storage-provider", "fs", "--default-storage-prefix", str(disk)]
    return [*where, "--shared-fs-usage", *SHARED]


def made(results: Path) -> set[str]:
    return {path.name for path in results.iterdir() if path.is_dir()}


@pytest.fixture
def other(new_checkout, tmp_path):
    """A second checkout of the same study, without records."""
    return new_checkout.copy(tmp_path / "other")


@needs_plugin
def test_the_fs_plugin_keeps_results_on_the_disk_for_every_working_directory(new_checkout, other, tmp_path):
    checkout, disk = new_checkout.copy(tmp_path / "checkout"), tmp_path / "disk"
    disk.mkdir()
    checkout.run(*plugin(disk))
    assert made(disk / "results") == {*FOLDERS, "tiny", "logs", "benchmarks"}
    assert len(list((disk / "results/tiny/figures/provenance").iterdir())) == 12
    for path in ("tiny/summary.json", "tiny/provenance.html", "tiny/claims/summary.json"):
        assert (disk / "results" / path).is_file()
    # What no rule declares stays in the working directory: scratch state, the index, the resolved configuration.
    left = checkout.root / "results"
    assert made(left) == {"state", "tiny"} and (left / "index.csv").is_file()
    state = {path.parent.name for path in left.glob("state/*/kept")}
    assert state > {path.name for path in (disk / "results/drafters").iterdir()}
    assert checkout.jobs(*plugin(disk)) == NOTHING
    assert {path.parent.name for path in left.glob("state/*/kept")} == state
    # Records lie in .snakemake/ of the first working directory: another one goes by names and times alone.
    assert other.jobs(*plugin(disk)) == NOTHING
    statistics = other.overlay({"bootstrap": {"n_resamples": 300}})
    assert checkout.jobs(*plugin(disk), "--configfile", str(other.root / statistics[1]))[
        "Computing statistics"
    ]
    assert other.jobs(*plugin(disk), *statistics) == NOTHING
    longer = other.overlay({"drafters": {"baseline": {"training": {"steps": 5}}}})
    # Statistics of this name are there, so nobody asks for the drafter that they were not made of, until forced to.
    assert other.jobs(*plugin(disk), *longer) == NOTHING
    forced = other.jobs(*plugin(disk), "-R", "compute_stats", *longer)
    assert forced["Training drafter dflash-mixed-s0"] == 1 and not forced["Preparing prompts: maths"]
    # What was asked for and is gone from the disk is made again.
    (disk / "results/tiny/figures/heatmap_tau.png").unlink()
    assert other.jobs(*plugin(disk)) == Counter(["Drawing figure heatmap_tau", "Tracing provenance"])


def test_a_directory_on_the_disk_holds_records_and_state_too(new_checkout, other, tmp_path):
    checkout, disk = new_checkout.copy(tmp_path / "checkout"), tmp_path / "disk/study"
    there = ("--directory", str(disk))
    checkout.run(*there)
    assert made(disk / "results") == {*FOLDERS, "tiny", "logs", "benchmarks", "state"}
    assert (disk / ".snakemake").is_dir() and not (checkout.root / "results").exists()
    assert checkout.jobs(*there) == other.jobs(*there) == NOTHING
    statistics = other.overlay({"bootstrap": {"n_resamples": 300}})
    changed = ("--configfile", str(other.root / statistics[1]))
    assert other.jobs(*there, *changed)["Computing statistics"] == 1
    # From anywhere, by the path of the Snakefile.
    command = [sys.executable, "-m", "snakemake", "-n", "--snakefile", str(other.root / "Snakefile"), *there]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Nothing to be done" in done.stdout + done.stderr


def test_results_may_be_a_link_to_the_disk(new_checkout, other, tmp_path):
    checkout, disk = new_checkout.copy(tmp_path / "checkout"), tmp_path / "disk"
    disk.mkdir()
    for one in (checkout, other):
        (one.root / "results").symlink_to(disk)
    checkout.run()
    assert made(disk) == {*FOLDERS, "tiny", "logs", "benchmarks", "state"}
    assert (checkout.root / "results").is_symlink()
    assert checkout.jobs() == NOTHING
    # Records stay in the checkout: another one goes by names and times alone.
    assert other.jobs() == NOTHING
    assert other.jobs(*other.overlay({"bootstrap": {"n_resamples": 300}})) == NOTHING
