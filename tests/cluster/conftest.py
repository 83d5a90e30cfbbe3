"""A real Slurm of one node (slurm.sh) and the study of tests/small.yaml on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from whole_runs import finish

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SCRIPT = HERE / "slurm.sh"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
# A user's shell on a Debian system does not look for daemons there.
DAEMONS = "/usr/sbin"


@dataclass(frozen=True)
class Slurm:
    """The running Slurm; its configuration and logs lie in ``folder``."""

    folder: Path

    def call(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def jobs(self) -> list[dict[str, str]]:
        """All jobs since it was started, as `scontrol` tells them, with the rule that each ran."""
        found = []
        for line in self.call("scontrol", "show", "job", "-o").splitlines():
            if not line.startswith("JobId="):
                continue
            job = dict(re.findall(r"(\w[\w:]*)=(\S*)", line))
            rule = re.match(r"rule_(.+?)(_wildcards|$)", job.get("Comment", ""))
            found.append(job | {"rule": rule[1] if rule else job.get("Comment", "")})
        return found

    def runs_still(self, job: dict[str, str]) -> bool:
        """Whether a step of a job has not ended yet: slurmd keeps a socket for each."""
        return any(self.folder.glob(f"spool/*_{job['JobId']}.*"))

    def node(self, state: str) -> None:
        """Take the node away (`down`) or give it back (`up`)."""
        subprocess.run([SCRIPT, "node", self.folder, state], check=True, timeout=60)

    def command(self, folder: Path, *arguments: str, overlays: tuple[Path, ...] = ()) -> list[str]:
        """Snakemake with the Slurm profile on the small study; what is not the profile's own is for haste only."""
        return [
            *(sys.executable, "-m", "snakemake"),
            *("--snakefile", str(REPOSITORY / "Snakefile"), "--directory", str(folder)),
            *("--workflow-profile", str(REPOSITORY / "workflow/profiles/slurm")),
            *("--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "5"),
            *arguments,
            *("--configfile", str(REPOSITORY / "config/smoke.yaml"), str(REPOSITORY / "tests/small.yaml")),
            *map(str, overlays),
        ]

    def run(self, folder: Path, *arguments: str, overlays: tuple[Path, ...] = ()) -> str:
        return finish(self.command(folder, *arguments, overlays=overlays))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """The running Slurm, or the reason why there is none."""
    search = f"{os.environ['PATH']}{os.pathsep}{DAEMONS}"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=search) is None]
    if missing:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)} missing): {SCRIPT.name} install")
    if os.getuid() != 0:
        pytest.skip("starting Slurm's daemons needs root")
    if find_spec("snakemake_executor_plugin_slurm") is None:
        pytest.skip("the Slurm plugin is not installed: pip install 'draftpool[cluster]'")
    folder = tmp_path_factory.mktemp("slurm")
    environment = os.environ | {"PATH": search}
    subprocess.run([SCRIPT, "start", folder], check=True, env=environment, timeout=120)
    try:
        yield Slurm(folder)
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True, env=environment, timeout=60)


@pytest.fixture(scope="session")
def slurm_study(slurm, tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    """The finished small study, and the Slurm jobs that made it."""
    folder = tmp_path_factory.mktemp("slurm_study")
    slurm.run(folder)
    return folder, slurm.jobs()


@pytest.fixture(scope="session")
def slurm_copy(slurm_study, tmp_path_factory) -> Path:
    """A copy of the finished small study, to go on from."""
    folder = tmp_path_factory.mktemp("copy") / "study"
    shutil.copytree(slurm_study[0], folder)
    return folder
