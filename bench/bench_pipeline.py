"""The workflow itself: planning a finished study, starting a stage, and the seconds every stage of the study took."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pandas as pd
from harness import REPOSITORY, RESULTS, Report, Study, interleave, parser, run, spread


def stage_seconds(study: Study) -> dict[str, list[tuple[float, float]]]:
    """Seconds and resident MB of the jobs that made this study (`results/benchmarks/`)."""
    found = defaultdict(list)
    for stage, artefacts in study.plan.by_stage().items():
        for id in artefacts:
            path = RESULTS / "benchmarks" / f"{stage}-{id}.tsv"
            if path.exists():
                row = pd.read_csv(path, sep="\t").iloc[-1]
                found[stage].append((float(row["s"]), float(row["max_rss"])))
    return dict(found)


def main() -> None:
    """Times of whole processes."""
    options = parser(__doc__)
    options.set_defaults(repeats=3)
    options = options.parse_args()
    study, report = Study(options.overlay), Report("pipeline", options)

    def process(*command: str):
        def run() -> None:
            subprocess.run([sys.executable, *command], cwd=REPOSITORY, check=True, capture_output=True)

        return run

    overlays = ["--configfile", *map(str, options.overlay)] if options.overlay else []
    arms = {
        "snakemake -n on the study (bar: at most 5)": process("-m", "snakemake", "-n", *overlays),
        "draftpool --help": process("-m", "draftpool.cli", "--help"),
        "start of a stage (imports of decode_live)": process(
            "-c", "import draftpool.decoding.live; from transformers import AutoConfig, AutoTokenizer"
        ),
        "start of a figure": process("-c", "import draftpool.figures.selectors"),
    }
    for name, values in interleave(arms, options.repeats, report.device).items():
        report.row(name, spread(values), "s")
    stages = stage_seconds(study)
    for stage, jobs in stages.items():
        report.row(f"{stage}, {len(jobs)} jobs", sum(seconds for seconds, _ in jobs), "s")
    if stages:
        jobs = [job for made in stages.values() for job in made]
        report.row("all jobs of the study", sum(seconds for seconds, _ in jobs) / 60, "min")
        report.row("largest job, resident", max(size for _, size in jobs) / 1024, "GiB")
    report.finish()


if __name__ == "__main__":
    run(main)
