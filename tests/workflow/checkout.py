"""A copy of the repository with a tiny study whose jobs only pretend: they parse flags and make outputs.

Snakemake is the real one, so that its records in .snakemake/ are what a real run leaves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

PRETEND = """#!{python}
import sys
from pathlib import Path
from draftpool.cli import _parser

flags = _parser().parse_args()
out = flags.out
if getattr(flags, "state", None) is not None:
    flags.state.mkdir(parents=True, exist_ok=True)
    (flags.state / "kept").write_text("scratch")
if flags.command in ("score_pool", "check_lossless", "draw_figure", "write_table", "provenance"):
    ends = {{"draw_figure": (".png", ".pdf"), "write_table": (".csv", ".md", ".tex", ".html")}}
    for end in ends.get(flags.command, (out.suffix,)):
        out.with_suffix(end).write_text(flags.command)
    if flags.command in ends:
        (out.parent / "provenance").mkdir(exist_ok=True)
        (out.parent / "provenance" / (out.stem + ".json")).write_text("{{}}")
else:
    out.mkdir()
    (out / "summary.json").write_text("{{}}")
    (out / "cfg.json").write_text(flags.cfg)
"""


@dataclass(frozen=True)
class Checkout:
    """One copy of the repository, its results and its records."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which Snakemake finds the pretended jobs and this copy's sources."""
        return os.environ | {
            "PATH": f"{self.root / 'pretend'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.root / "src"),
        }

    def snakemake(
        self, *arguments: str, pretend: bool = True, **variables: str
    ) -> subprocess.CompletedProcess:
        """Run Snakemake with further variables; with ``pretend=False`` its jobs are the real ones."""
        own = {} if pretend else {"PATH": os.environ["PATH"]}
        return subprocess.run(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=self.root,
            env=self.environment | own | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def jobs(self, *arguments: str) -> Counter[str]:
        """Return the jobs of a dry run by their messages, hashes cut off."""
        done = self.snakemake("-n", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        messages = re.findall(r"^Job \d+: (.*)$", done.stdout + done.stderr, flags=re.MULTILINE)
        return Counter(re.sub(r"-[0-9a-f]{12}$", "", message) for message in messages)

    def run(self, *arguments: str) -> str:
        """Run the study and return what Snakemake prints."""
        done = self.snakemake("--cores", "2", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def read_config(self) -> dict:
        return yaml.safe_load((self.root / "config/default.yaml").read_text())

    def write_config(self, config: dict) -> None:
        (self.root / "config/default.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def overlay(self, changes: dict) -> tuple[str, str]:
        """Write an overlay and return the flags that lay it over the study."""
        (self.root / "overlay.yaml").write_text(yaml.safe_dump(changes))
        return "--configfile", "overlay.yaml"

    def append(self, source: str, text: str) -> None:
        """Append to a file of the package."""
        with (self.root / "src/draftpool" / source).open("a", encoding="utf-8") as handle:
            handle.write(text)

    def copy(self, root: Path) -> Checkout:
        """Copy everything, records and modification times included, as `cp -a` does."""
        shutil.copytree(self.root, root, symlinks=True)
        return Checkout(root)


def make_checkout(root: Path) -> Checkout:
    """Copy what Snakemake needs of the repository to ``root``, with the tiny study as its default one."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", "workflow"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=ignored)
    shutil.copy(REPOSITORY / "Snakefile", root / "Snakefile")
    shutil.copy(REPOSITORY / "profiles", root / "profiles", follow_symlinks=False)
    (root / "config").mkdir()
    shutil.copy(HERE / "config.yaml", root / "config/default.yaml")
    shutil.copy(REPOSITORY / "config/claims.yaml", root / "config/claims.yaml")
    pretend = root / "pretend/draftpool"
    pretend.parent.mkdir()
    pretend.write_text(PRETEND.format(python=sys.executable))
    pretend.chmod(0o755)
    return Checkout(root)
