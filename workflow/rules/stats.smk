"""Stage compute_stats: every statistic of the study, from which figures and tables are made."""

DECODE_IDS = [artefact.id for artefact in PLAN.decodes.values()]


localrules:
    compute_stats,
    copy_summary,
    judge_claims,


rule compute_stats:
    """Turn tables into statistics.

    Inputs: the acceptance table, live decoding, replays, training logs, the losslessness report, held-out answers.
    Outputs: a folder with tidy CSV tables and summary.json.
    """
    input:
        acceptance=each(ACCEPTANCE, ARTEFACTS["score_pool"]),
        decodes=each(DECODE, DECODE_IDS),
        profiles=each(PROFILE, ARTEFACTS["profile_decode"]),
        replays=each(REPLAY, ARTEFACTS["replay_selectors"]),
        training=each(
            DRAFTER, (PLAN.drafter(name).id for name, run in PLAN.runs.items() if run.recipe.trained)
        ),
        lossless=each(LOSSLESS, ARTEFACTS["check_lossless"]),
        responses=each(RESPONSES, (PLAN.responses[name, "eval"].id for name in PLAN.held_out)),
    output:
        directory(STATS),
    log:
        f"results/logs/compute_stats/{PLAN.study.experiment}.log",
    benchmark:
        f"results/benchmarks/compute_stats-{PLAN.study.experiment}.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        cfg=canonical_json(PLAN.stats_cfg),
        code=stage_code("compute_stats", PLAN.stats_cfg),
        # Read for the time of each stage, but no input: a job that took longer changes no statistic.
        benchmarks=[f"results/benchmarks/{stage}-{id}.tsv" for stage, ids in ARTEFACTS.items() for id in ids],
    message:
        "Computing statistics"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool compute_stats \
            --cfg {params.cfg:q} \
            --acceptance {input.acceptance:q} \
            --decodes {input.decodes:q} \
            --profiles {input.profiles:q} \
            --replays {input.replays:q} \
            --training {input.training:q} \
            --lossless {input.lossless:q} \
            --responses {input.responses:q} \
            --benchmarks $(ls {params.benchmarks:q} 2>/dev/null || true) \
            --threads {threads} \
            --out {output:q}
        """


rule copy_summary:
    """Put the headline numbers where readers look for them.

    Inputs: the statistics.
    Outputs: summary.json.
    """
    input:
        STATS,
    output:
        SUMMARY,
    log:
        f"results/logs/copy_summary/{PLAN.study.experiment}.log",
    benchmark:
        f"results/benchmarks/copy_summary-{PLAN.study.experiment}.tsv"
    threads: 1
    resources:
        mem_mb=100,
        runtime=5,
    message:
        "Copying summary.json"
    shell:
        """
        cp {input:q}/summary.json {output:q} 2>{log:q}
        """


rule judge_claims:
    """Give every published claim of config/claims.yaml a verdict.

    Inputs: the statistics.
    Outputs: a folder with claims.json, claims.md and claims.html.
    """
    input:
        stats=STATS,
    output:
        report(
            directory(CLAIMS),
            patterns=["{name}.html"],
            caption="../report/claims.rst",
            category="Claims",
            labels={"claims": "verdicts"},
        ),
    log:
        f"results/logs/judge_claims/{PLAN.study.experiment}.log",
    benchmark:
        f"results/benchmarks/judge_claims-{PLAN.study.experiment}.tsv"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        cfg=canonical_json({"claims": PUBLISHED, "bootstrap": PLAN.stats_cfg["bootstrap"]}),
        code=stage_code("judge_claims", {}),
    message:
        "Judging published claims"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool judge_claims \
            --cfg {params.cfg:q} \
            --stats {input.stats:q} \
            --threads {threads} \
            --out {output:q}
        """
