"""Tables: one rule each, from the statistics alone.

Inputs: the statistics.
Outputs: the table as CSV, Markdown and LaTeX.
"""

for table in TABLE_NAMES:

    rule:
        name:
            f"write_{table}"
        input:
            stats=STATS,
        output:
            csv=report(
                f"{STUDY}/tables/{table}.csv",
                caption=f"../report/{table}.rst",
                category="Tables",
                labels={"table": table.replace("_", " ")},
            ),
            md=f"{STUDY}/tables/{table}.md",
            tex=f"{STUDY}/tables/{table}.tex",
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
