"""Stages check_lossless, decode_live and profile_decode: the target decodes with the pool."""


rule check_lossless:
    """Compare speculative with plain decoding, token for token; live decoding waits for it.

    Inputs: the target, held-out prompts, all drafters that decode.
    Outputs: the losslessness report.
    """
    input:
        target=upstream("check_lossless", "target", TARGET),
        prompts=upstream("check_lossless", "prompts", PROMPTS),
        drafters=drafters_of("check_lossless"),
    output:
        LOSSLESS,
    log:
        "results/logs/check_lossless/{id}.log",
    benchmark:
        "results/benchmarks/check_lossless-{id}.tsv"
    wildcard_constraints:
        id=known("check_lossless"),
    threads: THREADS
    resources:
        gpu=GPU,
        mem_mb=8000,
        runtime=120,
    params:
        cfg=cfg_of("check_lossless"),
        code=code_of("check_lossless"),
    message:
        "Checking losslessness: {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool check_lossless \
            --cfg {params.cfg:q} \
            --target {input.target:q} \
            --prompts {input.prompts:q} \
            --drafters {input.drafters:q} \
            --threads {threads} \
            --out {output:q}
        """


rule decode_live:
    """Decode one stream in one dtype under every selector, plain decoding beside it in the same process.

    Inputs: the target, held-out prompts, all drafters that decode, the losslessness report, costs and routes (if asked).
    Outputs: a folder with the step table and the sequence table.
    """
    input:
        target=upstream("decode_live", "target", TARGET),
        prompts=upstream("decode_live", "prompts", PROMPTS),
        drafters=drafters_of("decode_live"),
        lossless=each(LOSSLESS, ARTEFACTS["check_lossless"]),
        costs=upstream("decode_live", "costs", COSTS),
        routes=upstream("decode_live", "routes", ROUTES),
        answers=upstream("decode_live", "answers", RESPONSES),
    output:
        directory(DECODE),
    log:
        "results/logs/decode_live/{id}.log",
    benchmark:
        "results/benchmarks/decode_live-{id}.tsv"
    wildcard_constraints:
        id=known("decode_live"),
    threads: THREADS
    resources:
        gpu=GPU,
        mem_mb=4000,
        runtime=480,
    params:
        cfg=cfg_of("decode_live"),
        code=code_of("decode_live"),
    message:
        "Decoding live: {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool decode_live \
            --cfg {params.cfg:q} \
            --target {input.target:q} \
            --prompts {input.prompts:q} \
            --drafters {input.drafters:q} \
            --lossless {input.lossless:q} \
            --costs {input.costs:q} \
            --routes {input.routes:q} \
            --answers {input.answers:q} \
            --state results/state/{wildcards.id} \
            --threads {threads} \
            --out {output:q}
        """


rule profile_decode:
    """Decode one prompt per method under the profiler.

    Inputs: the target, held-out prompts, all drafters that decode, the losslessness report, costs and routes (if asked).
    Outputs: a folder with a Chrome trace per method and the time of a round's parts.
    """
    input:
        target=upstream("profile_decode", "target", TARGET),
        prompts=upstream("profile_decode", "prompts", PROMPTS),
        drafters=drafters_of("profile_decode"),
        lossless=each(LOSSLESS, ARTEFACTS["check_lossless"]),
        costs=upstream("profile_decode", "costs", COSTS),
        routes=upstream("profile_decode", "routes", ROUTES),
    output:
        directory(PROFILE),
    log:
        "results/logs/profile_decode/{id}.log",
    benchmark:
        "results/benchmarks/profile_decode-{id}.tsv"
    wildcard_constraints:
        id=known("profile_decode"),
    threads: THREADS
    resources:
        gpu=GPU,
        mem_mb=4000,
        runtime=60,
    params:
        cfg=cfg_of("profile_decode"),
        code=code_of("profile_decode"),
    message:
        "Profiling: {wildcards.id}"
    shell:
        """
        exec &> >(tee -i {log:q})
        draftpool profile_decode \
            --cfg {params.cfg:q} \
            --target {input.target:q} \
            --prompts {input.prompts:q} \
            --drafters {input.drafters:q} \
            --costs {input.costs:q} \
            --routes {input.routes:q} \
            --threads {threads} \
            --out {output:q}
        """
