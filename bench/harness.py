"""What all benchmarks share: interleaved timing, ratios with spread, the study, one JSON line at the end."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from draftpool.config.load import load
from draftpool.config.plan import Plan
from draftpool.decoding.clock import interleave as interleave
from draftpool.errors import DraftpoolError
from draftpool.targets.load import resolve_device

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "results"


def parser(description: str) -> argparse.ArgumentParser:
    """Options of every benchmark."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    made.add_argument("--repeats", type=int, default=20, help="measured repeats; a fifth more warms up")
    made.add_argument(
        "--overlay", type=Path, nargs="*", default=[], help="overlays of the study whose artefacts are used"
    )
    made.add_argument("--out", type=Path, default=RESULTS / "bench", help="folder of the JSON files")
    return made


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; what it cannot work with ends in one line and exit status 2."""
    try:
        main()
    except DraftpoolError as error:
        print(f"draftpool: error: {error}", file=sys.stderr)
        sys.exit(2)


class Study:
    """Folders of a finished study: config/default.yaml and overlays.

    Raises:
        DraftpoolError: When a folder is asked for that was not made.
    """

    def __init__(self, overlays: list[Path]):
        self.plan = Plan(load(REPOSITORY / "config" / "default.yaml", *overlays))

    def _folder(self, kind: str, name: str) -> Path:
        folder = RESULTS / kind / name
        if not folder.is_dir():
            raise DraftpoolError("not made yet", str(folder), "run `make study` first")
        return folder

    @property
    def taps(self) -> list[int] | None:
        """Tapped layers."""
        return self.plan.study.target.taps

    @property
    def target(self) -> Path:
        """The target folder."""
        return self._folder("targets", self.plan.target.id)

    @property
    def pool(self) -> dict[str, Path]:
        """Drafter folders of the pool, generalist first."""
        names = sorted(self.plan.study.pool, key=lambda name: name != self.plan.study.generalist)
        return {name: self._folder("drafters", self.plan.drafter(name).id) for name in names}

    def drafter(self, name: str) -> Path:
        """Folder of one drafter."""
        return self._folder("drafters", self.plan.drafter(name).id)

    def responses(self, split: str) -> list[Path]:
        """Response folders of all domains."""
        return [
            self._folder("responses", self.plan.responses[domain, split].id)
            for domain in self.plan.study.domains
        ]


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0], "n": 1}
    low, _, high = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "low": low, "high": high, "n": len(values)}


def ratio(times: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Median and quartiles of the paired ratios of two arms' times."""
    return spread([a / b for a, b in zip(times[above], times[below], strict=True)])


def total_ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    """Ratio of the summed times of two arms."""
    return sum(seconds[above]) / sum(seconds[below])


class Report:
    """Rows of one benchmark: a table for people while it runs, a JSON file and a JSON line at the end."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.name, self.out = name, options.out
        self.device = resolve_device(options.device)
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
        ).stdout.strip()
        self.result: dict = {
            "benchmark": name,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else platform.machine(),
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "commit": commit,
            "rows": {},
        }
        print(f"{'what':56s} {'median':>9s} {'quartiles':>19s}  unit")

    def row(self, what: str, values: dict[str, float] | float, unit: str) -> None:
        """Add one measured quantity."""
        if not isinstance(values, dict):
            values = {"median": values, "low": values, "high": values, "n": 1}
        self.result["rows"][what] = values | {"unit": unit}
        print(
            f"{what:56s} {values['median']:9.3f} {values['low']:9.3f} {values['high']:9.3f}  {unit}",
            flush=True,
        )

    def finish(self) -> None:
        """Write `<out>/<name>.json` and print it as one line."""
        self.out.mkdir(parents=True, exist_ok=True)
        line = json.dumps(self.result)
        (self.out / f"{self.name}.json").write_text(line + "\n")
        print(line)
