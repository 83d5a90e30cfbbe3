"""draftpool: which drafter should write the next block?

`snakemake --cores 2` runs the study of config/default.yaml; `--configfile OVERLAY.yaml` lays another file over it.
What each stage reads, and under which id its result is kept: src/draftpool/config/plan.py. Targets: all, figures,
tables, stats, drafters.
"""


configfile: f"{workflow.basedir}/config/default.yaml"


# The first page of `snakemake --report report.zip`.
report: "workflow/report/workflow.rst"


# Inert unless asked for by --software-deployment-method; envs/Containerfile builds an image with draftpool in it.
container: "docker://python:3.11-slim"


include: "workflow/rules/common.smk"


# What jobs are told by the environment; executors without a shared environment pass it on.
envvars:
    "DRAFTPOOL_DTYPES",
    "DRAFTPOOL_SPLITS",


localrules:
    all,
    figures,
    tables,
    stats,
    drafters,


rule all:
    """The whole study: every figure and table, summary.json, the verdicts on published claims, and the provenance."""
    input:
        FIGURES,
        TABLES,
        SUMMARY,
        CLAIMS,
        PROVENANCE,


rule figures:
    """Every figure of the study."""
    input:
        FIGURES,


rule tables:
    """Every table of the study."""
    input:
        TABLES,


rule stats:
    """Every statistic of the study, and summary.json."""
    input:
        STATS,
        SUMMARY,


rule drafters:
    """Every drafter of the study."""
    input:
        each(DRAFTER, (PLAN.drafter(name).id for name in PLAN.runs)),


include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/score.smk"
include: "workflow/rules/decode.smk"
include: "workflow/rules/replay.smk"
include: "workflow/rules/stats.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/provenance.smk"


onstart:
    try:
        lock_results(RESULTS)
    except DraftpoolError as error:
        sys.exit(f"draftpool: error: {error}")
    print(banner(PLAN, RESULTS), file=sys.stderr)
    write_overview(PLAN, RESULTS)


onsuccess:
    finished = [path for path in [*FIGURES, *TABLES, SUMMARY] if Path(path).is_file()]
    print("\n".join(["Figures and tables:", *(f"  {path}" for path in finished)]), file=sys.stderr)
