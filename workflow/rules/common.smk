"""Paths of everything the rules read and write, and look-ups in the study's plan.

An artefact's id, configuration and inputs come from draftpool.config.plan; nothing is decided here.
"""

import re
import sys
from pathlib import Path

from draftpool.artefacts import canonical_json
from draftpool.config.digest import code_digest
from draftpool.config.environment import lock_results, prepare_jobs
from draftpool.config.hardware import uses_gpu
from draftpool.config.load import read_yaml, resolve
from draftpool.config.outputs import figure_names, table_names
from draftpool.config.overview import banner, write_overview
from draftpool.config.plan import Plan
from draftpool.config.stages import check_kinds, stage_code
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
# A cluster's executor limits jobs, not cores, and a node may have more than the job asked for.
ON_CLUSTER_THREADS = 4
try:
    THREADS = PLAN.study.threads or (ON_CLUSTER_THREADS if workflow.remote_exec else workflow.cores)
except WorkflowError:
    THREADS = ON_CLUSTER_THREADS
GPU = int(uses_gpu(PLAN.study.device))

FIGURE_NAMES = figure_names(PLAN)
TABLE_NAMES = table_names(PLAN)
FIGURES = [f"{STUDY}/figures/{name}.{end}" for name in FIGURE_NAMES for end in ("png", "pdf")]
TABLES = [f"{STUDY}/tables/{name}.{end}" for name in TABLE_NAMES for end in ("csv", "md", "tex", "html")]

prepare_jobs(PLAN)


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
    """Return a number of threads: those of the job's artefact, or of the study; one for each process at least."""

    def threads(wildcards):
        artefact = ARTEFACTS[stage][wildcards.id]
        return max(artefact.threads or THREADS, artefact.processes)

    return threads


def each_process(stage, amount):
    """Return a resource: so much for every process of the job."""
    return lambda wildcards: amount * ARTEFACTS[stage][wildcards.id].processes


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
