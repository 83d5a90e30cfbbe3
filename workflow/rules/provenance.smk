"""How every figure, every table and the verdicts were made, back to the prompts and the target."""


localrules:
    trace_provenance,


rule trace_provenance:
    """Follow what every job recorded of itself.

    Inputs: figures, tables, verdicts on claims.
    Outputs: one page; `draftpool provenance FILE` tells the same of a single file.
    """
    input:
        shown=[*FIGURES, *TABLES],
        records=[
            *(f"{STUDY}/figures/provenance/{name}.json" for name in FIGURE_NAMES),
            *(f"{STUDY}/tables/provenance/{name}.json" for name in TABLE_NAMES),
        ],
        claims=CLAIMS,
    output:
        report(
            PROVENANCE,
            caption="../report/provenance.rst",
            category="Provenance",
            labels={"provenance": "figures, tables and claims"},
        ),
    log:
        f"results/logs/trace_provenance/{PLAN.study.experiment}.log",
    benchmark:
        f"results/benchmarks/trace_provenance-{PLAN.study.experiment}.tsv"
    threads: 1
    resources:
        mem_mb=500,
        runtime=10,
    params:
        code=code_digest("draftpool.provenance.chain", "draftpool.provenance.tree"),
    message:
        "Tracing provenance"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool provenance {input.records:q} {input.claims:q} --out {output:q}
        """
