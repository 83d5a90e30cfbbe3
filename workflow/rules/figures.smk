"""Figures: one rule each, from the statistics alone.

Inputs: the statistics.
Outputs: the figure as PNG and PDF, and how it was made.
"""

for figure in FIGURE_NAMES:

    rule:
        name:
            f"draw_{figure}"
        input:
            stats=STATS,
        output:
            png=report(
                f"{STUDY}/figures/{figure}.png",
                caption=f"../report/{figure}.rst",
                category="Figures",
                labels={"figure": figure.replace("_", " ")},
            ),
            pdf=f"{STUDY}/figures/{figure}.pdf",
            provenance=f"{STUDY}/figures/provenance/{figure}.json",
        log:
            f"results/logs/draw_figure/{PLAN.study.experiment}-{figure}.log",
        benchmark:
            f"results/benchmarks/draw_figure-{PLAN.study.experiment}-{figure}.tsv"
        localrule: True
        threads: 1
        resources:
            mem_mb=1000,
            runtime=10,
        params:
            cfg=figure,
            code=code_digest(f"draftpool.figures.{figure}"),
        message:
            "Drawing figure {params.cfg}"
        shell:
            """
            exec &> >(tee -i {log:q})
            draftpool draw_figure \
                --name {params.cfg:q} \
                --stats {input.stats:q} \
                --out {output.png:q}
            """
