"""Stages profile_costs, train_router and replay_selectors: every selector replayed without a model, and its price."""


rule profile_costs:
    """Measure the parts of a round, once.

    Inputs: the target, the held-out answers, the pool's drafters.
    Outputs: a folder with the seconds of drafting, verifying, evaluating, catching up and selecting.
    """
    input:
        target=upstream("profile_costs", "target", TARGET),
        responses=upstream("profile_costs", "responses", RESPONSES),
        drafters=drafters_of("profile_costs"),
    output:
        directory(COSTS),
    log:
        "results/logs/profile_costs/{id}.log",
    benchmark:
        "results/benchmarks/profile_costs-{id}.tsv"
    wildcard_constraints:
        id=known("profile_costs"),
    threads: THREADS
    resources:
        gpu=GPU,
        mem_mb=4000,
        runtime=30,
    params:
        cfg=cfg_of("profile_costs"),
        code=code_of("profile_costs"),
    message:
        "Measuring the costs of a round"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool profile_costs \
            --cfg {params.cfg:q} \
            --target {input.target:q} \
            --responses {input.responses:q} \
            --drafters {input.drafters:q} \
            --threads {threads} \
            --out {output:q}
        """


rule train_router:
    """Train classifiers that name a prompt's domain.

    Inputs: prompts, and the answers of both splits (which prompts were short enough, hidden states).
    Outputs: a folder with the route of every held-out prompt.
    """
    input:
        prompts=upstream("train_router", "prompts", PROMPTS),
        train=upstream("train_router", "train", RESPONSES),
        heldout_prompts=upstream("train_router", "heldout_prompts", PROMPTS),
        heldout=upstream("train_router", "heldout", RESPONSES),
    output:
        directory(ROUTES),
    log:
        "results/logs/train_router/{id}.log",
    benchmark:
        "results/benchmarks/train_router-{id}.tsv"
    wildcard_constraints:
        id=known("train_router"),
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        cfg=cfg_of("train_router"),
        code=code_of("train_router"),
    message:
        "Training routers"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool train_router \
            --cfg {params.cfg:q} \
            --prompts {input.prompts:q} \
            --train {input.train:q} \
            --heldout_prompts {input.heldout_prompts:q} \
            --heldout {input.heldout:q} \
            --threads {threads} \
            --out {output:q}
        """


rule replay_selectors:
    """Replay every selector on every stream.

    Inputs: the acceptance table, the costs, the held-out answers, the routes.
    Outputs: a folder with rounds and modelled seconds per answer, and the oracles.
    """
    input:
        acceptance=upstream("replay_selectors", "acceptance", ACCEPTANCE),
        costs=upstream("replay_selectors", "costs", COSTS),
        responses=upstream("replay_selectors", "responses", RESPONSES),
        routes=upstream("replay_selectors", "routes", ROUTES),
    output:
        directory(REPLAY),
    log:
        "results/logs/replay_selectors/{id}.log",
    benchmark:
        "results/benchmarks/replay_selectors-{id}.tsv"
    wildcard_constraints:
        id=known("replay_selectors"),
    threads: 1
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        cfg=cfg_of("replay_selectors"),
        code=code_of("replay_selectors"),
    message:
        "Replaying selectors"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool replay_selectors \
            --cfg {params.cfg:q} \
            --acceptance {input.acceptance:q} \
            --costs {input.costs:q} \
            --responses {input.responses:q} \
            --routes {input.routes:q} \
            --threads {threads} \
            --out {output:q}
        """
