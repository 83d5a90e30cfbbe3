"""Stage score_pool: the acceptance table, from which tau and exact replay follow without decoding."""


rule score_pool:
    """Score every drafter at every position of the target's held-out answers.

    Inputs: the target, the held-out answers of all domains, all drafters.
    Outputs: the acceptance table.
    """
    input:
        target=upstream("score_pool", "target", TARGET),
        responses=upstream("score_pool", "responses", RESPONSES),
        drafters=drafters_of("score_pool"),
    output:
        ACCEPTANCE,
    log:
        "results/logs/score_pool/{id}.log",
    benchmark:
        "results/benchmarks/score_pool-{id}.tsv"
    wildcard_constraints:
        id=known("score_pool"),
    threads: THREADS
    resources:
        gpu=GPU,
        mem_mb=8000,
        runtime=120,
    params:
        cfg=cfg_of("score_pool"),
        code=code_of("score_pool"),
    message:
        "Scoring all drafters: {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool score_pool \
            --cfg {params.cfg:q} \
            --target {input.target:q} \
            --responses {input.responses:q} \
            --drafters {input.drafters:q} \
            --state results/state/{wildcards.id} \
            --threads {threads} \
            --out {output:q}
        """
