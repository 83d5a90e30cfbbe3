"""What is paid before any work: a finished study of 500 jobs is found finished, and each stage imports and loads."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from harness import REPOSITORY, Report, Study, interleave, parser, run, spread

from draftpool.cli import STAGES, WITHOUT_TORCH

sys.path.append(str(REPOSITORY / "tests/workflow"))

JOBS = 500
# Stages that load the target, and what they load beside it.
WITH_DRAFTERS = ("check_lossless", "score_pool", "decode_live", "profile_decode", "profile_costs")
WITH_TARGET = ("generate_responses", *WITH_DRAFTERS)

LOAD = """
import sys
from pathlib import Path
import torch
import {module}
from draftpool.targets.load import load_target, load_tokenizer
folder = Path(sys.argv[1])
target = load_target(folder, {taps}, torch.device("cpu"), torch.float32)
load_tokenizer(folder)
for place in sys.argv[2:]:
    from draftpool.drafters.load import load_drafter
    load_drafter("drafter", Path(place), target)
"""
# A training loads single tensors of the target.
LOAD_WEIGHTS = """
import sys
from pathlib import Path
import torch
import {module}
from draftpool.targets.load import load_tokenizer, load_weights
load_weights(Path(sys.argv[1]), torch.float32).embedding()
load_tokenizer(Path(sys.argv[1]))
"""


def starts(study: Study) -> dict[str, list[str]]:
    """For every stage the command that imports and loads what it does before its first piece of work."""
    commands = {}
    for stage, place in STAGES.items():
        module = place.split(":")[0]
        code, arguments, what = f"import {module}", [], "imports"
        if stage in WITH_TARGET:
            code, arguments, what = LOAD, [study.target], "imports, target"
        if stage in WITH_DRAFTERS:
            arguments, what = (
                [study.target, *study.pool.values()],
                f"imports, target, {len(study.pool)} drafters",
            )
        if stage == "train_drafter":
            code, arguments, what = LOAD_WEIGHTS, [study.target], "imports, target's weights"
        if stage not in WITHOUT_TORCH and code.startswith("import"):
            code = f"import torch\n{code}"
        text = code.format(module=module, taps=study.taps)
        commands[f"start of {stage} ({what})"] = [sys.executable, "-c", text, *map(str, arguments)]
    for what in ("figures.leaderboard", "tables.leaderboard_table"):
        commands[f"start of {what} (imports)"] = [sys.executable, "-c", f"import draftpool.{what}"]
    return commands


def finished_study(folder: Path):
    """A study of at least `JOBS` jobs that were only pretended, in its own checkout."""
    from checkout import make_checkout

    checkout = make_checkout(folder / "checkout")
    config = checkout.read_config()
    config["drafters"]["general"]["seeds"] = list(range(JOBS))
    config["decode"]["streams"], config["replay"] = {}, None
    config["pool"], config["selectors"] = [], {}
    config["prompt_sets"] = {}
    checkout.write_config(config)
    checkout.run("--quiet")
    return checkout


def main() -> None:
    """Times of whole processes, in seconds."""
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    options = options.parse_args()
    study, report = Study(options.overlay), Report("startup", options)

    def process(command: list[str]):
        return lambda: subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)

    commands = {name: process(command) for name, command in starts(study).items()}
    for name, values in interleave(commands, options.repeats, report.device).items():
        report.row(name, spread(values), "s")
    with tempfile.TemporaryDirectory() as folder:
        checkout = finished_study(Path(folder))
        made = len(list((checkout.root / "results/benchmarks").iterdir()))
        nothing = {"nothing": lambda: checkout.run("--quiet")}
        name = f"snakemake on a finished study of {made} jobs (bar: at most 15)"
        report.row(name, spread(interleave(nothing, options.repeats, report.device)["nothing"]), "s")
    report.finish()


if __name__ == "__main__":
    run(main)
