"""Stages train_drafter, make_drafter and fetch_drafter: one drafter a job."""


localrules:
    make_drafter,
    fetch_drafter,


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


rule make_drafter:
    """Write the folder of a drafter that is not trained.

    Inputs: the training answers, if they are its frozen store.
    Outputs: a folder with its options, and the store.
    """
    input:
        responses=upstream("make_drafter", "responses", RESPONSES),
    output:
        directory(DRAFTER),
    log:
        "results/logs/make_drafter/{id}.log",
    benchmark:
        "results/benchmarks/make_drafter-{id}.tsv"
    wildcard_constraints:
        id=known("make_drafter"),
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        cfg=cfg_of("make_drafter"),
        code=code_of("make_drafter"),
    message:
        "Making drafter {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool make_drafter \
            --cfg {params.cfg:q} \
            --responses {input.responses:q} \
            --threads {threads} \
            --out {output:q}
        """


rule fetch_drafter:
    """Fetch a published drafter and write it in our layout.

    Inputs: the target that it must fit.
    Outputs: a folder with weights and configuration.
    """
    input:
        target=upstream("fetch_drafter", "target", TARGET),
    output:
        directory(DRAFTER),
    log:
        "results/logs/fetch_drafter/{id}.log",
    benchmark:
        "results/benchmarks/fetch_drafter-{id}.tsv"
    wildcard_constraints:
        id=known("fetch_drafter"),
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        cfg=cfg_of("fetch_drafter"),
        code=code_of("fetch_drafter"),
    message:
        "Fetching drafter {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool fetch_drafter \
            --cfg {params.cfg:q} \
            --target {input.target:q} \
            --threads {threads} \
            --out {output:q}
        """
