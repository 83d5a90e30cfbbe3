"""Stage train_drafter: one drafter a job."""


rule train_drafter:
    """Train one drafter; a killed job goes on from its last checkpoint in results/state/.

    Inputs: the target, the training answers of its domains, the drafter it starts from (if any).
    Outputs: a folder with weights, configuration and training log.
    """
    input:
        target=upstream("train_drafter", "target", TARGET),
        responses=upstream("train_drafter", "responses", RESPONSES),
        init=upstream("train_drafter", "init", DRAFTER),
    output:
        directory(DRAFTER),
    log:
        "results/logs/train_drafter/{id}.log",
    benchmark:
        "results/benchmarks/train_drafter-{id}.tsv"
    wildcard_constraints:
        id=known("train_drafter"),
    threads: threads_of("train_drafter")
    resources:
        gpu=GPU,
        mem_mb=4000,
        runtime=480,
    params:
        cfg=cfg_of("train_drafter"),
        code=code_of("train_drafter"),
    message:
        "Training drafter {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool train_drafter \
            --cfg {params.cfg:q} \
            --target {input.target:q} \
            --responses {input.responses:q} \
            --init {input.init:q} \
            --state results/state/{wildcards.id} \
            --threads {threads} \
            --out {output:q}
        """
