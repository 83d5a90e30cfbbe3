"""Tables: one rule each, from the statistics alone.

Inputs: the statistics.
Outputs: the table as CSV, Markdown, LaTeX and HTML, and how it was made.
"""

for table in TABLE_NAMES:

    rule:
        name:
            f"write_{table}"
        input:
            stats=STATS,
        output:
            html=report(
                f"{STUDY}/tables/{table}.html",
                caption=f"../report/{table}.rst",
                category="Tables",
                labels={"table": table.removesuffix("_table").replace("_", " ")},
            ),
            csv=f"{STUDY}/tables/{table}.csv",
            md=f"{STUDY}/tables/{table}.md",
            tex=f"{STUDY}/tables/{table}.tex",
            provenance=f"{STUDY}/tables/provenance/{table}.json",
        log:
            f"results/logs/write_table/{PLAN.study.experiment}-{table}.log",
        benchmark:
            f"results/benchmarks/write_table-{PLAN.study.experiment}-{table}.tsv"
        localrule: True
        threads: 1
        resources:
            mem_mb=500,
            runtime=10,
        params:
            cfg=table,
            code=code_digest(f"draftpool.tables.{table}"),
        message:
            "Writing table {params.cfg}"
        shell:
            """
            exec &> >(tee -i {log:q})
            draftpool write_table \
                --name {params.cfg:q} \
                --stats {input.stats:q} \
                --out {output.csv:q}
            """
