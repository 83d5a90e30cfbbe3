"""Paths of everything the rules read and write, and look-ups in the study's plan.

An artefact's id, configuration and inputs come from draftpool.config.plan; nothing is decided here.
"""

import re
import sys
from pathlib import Path

from draftpool import figures, tables
from draftpool.artefacts import canonical_json
from draftpool.config.digest import code_digest
from draftpool.config.environment import lock_results, prepare_jobs
from draftpool.config.hardware import uses_gpu
from draftpool.config.load import read_yaml, resolve
from draftpool.config.overview import banner, write_overview
from draftpool.config.plan import Plan
from draftpool.config.stages import check_kinds, stage_code
from draftpool.data.streams import MAIN
from draftpool.errors import DraftpoolError
from snakemake.exceptions import WorkflowError

try:
    PLAN = Plan(resolve(config))
    check_kinds(PLAN)
    ARTEFACTS = PLAN.by_stage()
    PUBLISHED = read_yaml(Path(workflow.basedir) / "config/claims.yaml").get("claims", [])
    CODE = {
        stage: {id: stage_code(stage, artefact.cfg) for id, artefact in artefacts.items()}
        for stage, artefacts in ARTEFACTS.items()
    }
except DraftpoolError as error:
    sys.exit(f"draftpool: error: {error}")

RESULTS = Path("results")
STUDY = f"results/{PLAN.study.experiment}"

TARGET = "results/targets/{id}"
PROMPTS = "results/prompts/{id}"
RESPONSES = "results/responses/{id}"
DRAFTER = "results/drafters/{id}"
LOSSLESS = "results/lossless/{id}/lossless.json"
ACCEPTANCE = "results/scores/{id}/acceptance.parquet"
DECODE = "results/decodes/{id}"
PROFILE = "results/profiles/{id}"
COSTS = "results/costs/{id}"
ROUTES = "results/routes/{id}"
REPLAY = "results/replays/{id}"
STATS = f"{STUDY}/stats"
SUMMARY = f"{STUDY}/summary.json"
CLAIMS = f"{STUDY}/claims"
PROVENANCE = f"{STUDY}/provenance.html"

# Heavy jobs take every core, so that none shares the machine with one that is timed.
try:
    THREADS = PLAN.study.threads or workflow.cores
except WorkflowError:
    # A cluster's executor limits jobs, not cores.
    THREADS = 4
GPU = int(uses_gpu(PLAN.study.device))

# What a figure or table needs of a study stands beside its module.
PARTS = {
    "scored": True,
    "pool": bool(PLAN.study.pool),
    "live": bool(PLAN.decodes),
    "profile": bool(PLAN.profiles),
    "replay": bool(ARTEFACTS["replay_selectors"]),
    # Live streams of which rounds can be compared, and of those the ones that are replayed.
    "live exact": any(PLAN.pool_of_stream(name) == MAIN for name in PLAN.exact_streams),
    "replay and live": bool(ARTEFACTS["replay_selectors"]) and any(PLAN.replayed_live),
    "pool_sizes": bool(ARTEFACTS["replay_selectors"]) and PLAN.study.replay.pool_sizes is not None,
    "pools": bool(PLAN.study.pools),
    "sweeps": any(sweep.group != "objective" for sweep in PLAN.study.sweeps.values()),
}
FIGURE_NAMES = [name for name, part in figures.FIGURES.items() if PARTS[part]]
TABLE_NAMES = [name for name, part in tables.TABLES.items() if PARTS[part]]
FIGURES = [f"{STUDY}/figures/{name}.{end}" for name in FIGURE_NAMES for end in ("png", "pdf")]
TABLES = [f"{STUDY}/tables/{name}.{end}" for name in TABLE_NAMES for end in ("csv", "md", "tex", "html")]

prepare_jobs(PLAN.dtypes)


def each(pattern, ids):
    """Return the path of every id."""
    return [pattern.format(id=id) for id in ids]


def known(stage):
    """Return a wildcard constraint: the ids that a stage makes in this study."""
    return "|".join(map(re.escape, ARTEFACTS[stage])) or "none"


def cfg_of(stage):
    """Return a param: the configuration of the job's stage as canonical JSON."""
    return lambda wildcards: canonical_json(ARTEFACTS[stage][wildcards.id].cfg)


def code_of(stage):
    """Return a param: the digest of the code that the job runs."""
    return lambda wildcards: CODE[stage][wildcards.id]


def threads_of(stage):
    """Return a number of threads: those of the job's artefact, or of the study."""
    return lambda wildcards: ARTEFACTS[stage][wildcards.id].threads or THREADS


def upstream(stage, key, pattern):
    """Return an input: paths of the artefacts that the job's artefact names under `key`."""

    def paths(wildcards):
        ids = ARTEFACTS[stage][wildcards.id].inputs[key] or []
        return each(pattern, [ids] if isinstance(ids, str) else ids)

    return paths


def drafters_of(stage):
    """Return an input: folders of the drafters in the job's configuration, in its order."""
    return lambda wildcards: each(
        DRAFTER, (drafter["id"] for drafter in ARTEFACTS[stage][wildcards.id].cfg["drafters"])
    )
