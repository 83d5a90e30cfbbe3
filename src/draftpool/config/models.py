"""Every option of a study, as strict pydantic models; config/README.md and schema.json are made of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from draftpool.config.prompt_sets import PromptSet
from draftpool.config.recipes import Recipe
from draftpool.config.strict import NAME, Strict, named
from draftpool.config.target import Archive, Target


class PromptSource(Strict):
    """One place that prompts are read from."""

    source: Literal["archive", "hub", "path"] = Field(
        description="A pinned archive, a Hub data set, or a local file."
    )
    archive: str | None = Field(None, description="`archive`: key of the `archives` block.")
    member: str | None = Field(None, description="`archive`: path or glob inside the archive.")
    format: Literal["jsonl", "json", "yaml"] | None = Field(None, description="Format of the member.")
    dataset: str | None = Field(
        None, description="`hub`: data set name, or a local folder that `datasets` reads."
    )
    name: str | None = Field(None, description="`hub`: configuration name of the data set.")
    split_name: str | None = Field(None, description="`hub`: split to read.")
    revision: str | None = Field(None, description="`hub`: commit or tag; pin it.")
    path: str | None = Field(None, description="`path`: a JSON Lines or Parquet file.")
    reader: str | None = Field(
        None, description="Registered function for oddly shaped rows (`data/readers.py`)."
    )
    template: str | None = Field(None, description="User message with `{field}` place holders.")
    reference: str | None = Field(None, description="Field with the reference answer.")
    group: str | None = Field(
        None, description="Field or registered function: rows of a group stay on one side of the split."
    )
    where: dict[str, Any] | None = Field(None, description="Keep rows whose fields have these values.")
    subset: str = Field(description="Label of this source in the prompt table.")
    split: Literal["train", "eval", "both"] = Field(description="Which side the rows may go to.")
    licence: str = Field(description="Licence as declared by the source.")


class Domain(Strict):
    """One domain of prompts."""

    train: Annotated[int, Field(ge=0)] = Field(
        description="Training prompts wanted (specialists may use all of them); 0: out of the pool's domains, "
        "met in streams that name it only."
    )
    eval: Annotated[int, Field(ge=0)] = Field(description="Held-out prompts wanted; 0: trained on only.")
    max_prompt_chars: int | None = Field(None, description="Longer user messages are left out.", ge=1)
    split_by: Literal["group"] | None = Field(None, description="`group`: split `both` sources by group.")
    near_duplicate_jaccard: float = Field(
        0.8,
        description="Training rows with a higher word Jaccard to a held-out row are dropped.",
        gt=0.0,
        le=1.0,
    )
    sources: list[PromptSource] = Field(description="Where the prompts come from.", min_length=1)


class Responses(Strict):
    """The target's own answers, which drafters are trained and scored on: greedy, but for sampled prompt sets."""

    max_new_tokens: int = Field(96, description="Tokens per answer, end-of-text token included.", ge=2)
    max_prompt_tokens: int = Field(
        256, description="Longer prompts (chat template applied) are left out.", ge=8
    )
    batch_sequences: int = Field(48, description="Answers written at the same time.", ge=1)


class Sweep(Strict):
    """Variations of one recipe: every combination of the listed overrides becomes a drafter."""

    base: str = Field(description="Recipe that is varied.")
    group: str = Field(description="Axis shown in the figures, for example `objective` or `alpha`.")
    over: dict[str, dict[str, Any]] = Field(
        description="Variant name -> overriding part of the recipe, "
        "for example `{b8: {model: {block_size: 8}}}`."
    )
    seeds: list[int] | None = Field(None, description="Training seeds; null: those of the base.")

    @field_validator("over")
    @classmethod
    def _variants_are_names(cls, value: dict) -> dict:
        return named(value)


class Stream(Strict):
    """An order of evaluation prompts that every selector meets."""

    domains: list[str] | Literal["all"] = Field(
        "all", description="Domains and prompt sets mixed; `all`: the domains with training prompts."
    )
    prompts_per_domain: int | None = Field(
        4, description="Held-out prompts (or sessions) of each; null: all.", ge=1
    )
    order: Literal["shuffled", "blocks"] = Field(
        "shuffled", description="Shuffled over domains, or domain after domain."
    )
    seed: int = Field(0, description="Seed of the order.")
    pool: str | None = Field(
        None, description="`decode` only: the pool of `pools` that decodes it; null: the main one."
    )


class Decode(Strict):
    """Live decoding of the target with the pool."""

    streams: dict[str, Stream] = Field(default={}, description="Named streams.")
    max_new_tokens: int = Field(64, description="Tokens per answer, end-of-text token included.", ge=2)
    temperature: float = Field(0.0, description="0 is greedy.", ge=0.0)
    top_p: float = Field(
        1.0,
        description="Above temperature 0: sample from the smallest set of most likely tokens with this probability.",
        gt=0.0,
        le=1.0,
    )
    verification: Literal["match", "rejection"] = Field(
        "match",
        description="`match`: a draft token is kept if it is the target's own; the text is the same whatever drafts. "
        "`rejection`: above temperature 0 drafts are sampled too, and kept so that the text has the target's law; "
        "it has no replay.",
    )
    repeats: int = Field(1, description="Sampled texts per prompt (one at temperature 0).", ge=1)
    selector_seeds: list[int] = Field(default=[0], description="Seeds of the learners.", min_length=1)
    dtypes: list[Literal["float32", "bfloat16"]] | Literal["auto"] = Field(
        "auto", description="`auto`: float32, and bfloat16 too where the processor multiplies it natively."
    )
    offload: Literal["none", "cpu"] = Field(
        "none",
        description="`cpu`: with a GPU, weights of drafters wait in main memory and only those of the active one are "
        "on the GPU; moving them is charged to the switch, and full information moves them all in every round.",
    )
    warmup_prompts: int = Field(1, description="Untimed prompts at the start.", ge=0)

    @field_validator("streams")
    @classmethod
    def _streams_are_names(cls, value: dict) -> dict:
        return named(value)


class Lossless(Strict):
    """The gate before live decoding."""

    prompts_per_domain: int = Field(4, description="Held-out prompts of each domain.", ge=1)
    max_new_tokens: int = Field(64, description="Tokens per answer.", ge=2)
    bfloat16_prompts: int = Field(6, description="Prompts on which bfloat16 is compared with float32.", ge=0)


class Profile(Strict):
    """One answer per method under torch's profiler."""

    methods: list[str] = Field(
        description="`plain`, `fixed:<drafter>` or names of selectors; each gets a Chrome trace.",
        min_length=1,
    )
    max_new_tokens: int = Field(32, description="Tokens per answer.", ge=2)


class Score(Strict):
    """The acceptance table."""

    prompts_per_domain: int | None = Field(
        None, description="Held-out prompts of each domain; null: all.", ge=1
    )
    bd_full_prompts: int = Field(
        0,
        description="Held-out prompts of each trained domain in which the target reads every draft to its end, so that "
        "selectors with `reward: bd_full` can be replayed there.",
        ge=0,
    )


class PoolSizes(Strict):
    """Replay on pools of several sizes, drawn from all drafters that decode live, the generalist in each."""

    sizes: list[Annotated[int, Field(ge=2)]] = Field(description="Numbers of drafters.", min_length=1)
    pools: int = Field(6, description="Pools drawn of each size.", ge=1)
    seeds: int = Field(10, description="Selector seeds.", ge=1)
    selectors: list[str] = Field(description="Names of replayed selectors.", min_length=1)


class Replay(Strict):
    """Exact replay of selectors on the acceptance table, priced by measured costs."""

    selectors: dict[str, dict[str, Any]] = Field(
        default={}, description="Selectors that are replayed besides the live ones; same form as `selectors`."
    )
    streams: dict[str, Stream] = Field(
        default={}, description="Streams that are replayed besides the live ones, answers at full length."
    )
    seeds: int = Field(200, description="Selector seeds of every selector.", ge=1)
    stream_seeds: int = Field(50, description="Selector seeds, at most, on the streams of this block.", ge=1)
    few: list[str] = Field(default=[], description="Selectors replayed with `few_seeds` only.")
    few_seeds: int = Field(10, description="Selector seeds of the selectors in `few`.", ge=1)
    pool_sizes: PoolSizes | None = Field(None, description="Regret against the pool's size; null: none.")
    cost_repeats: int = Field(
        25, description="Measurements of every part of a round; medians are the costs.", ge=3
    )

    @field_validator("selectors", "streams")
    @classmethod
    def _keys_are_names(cls, value: dict) -> dict:
        return named(value)


class Pool(Strict):
    """Another pool of the same study's drafters, replayed beside the main one."""

    drafters: list[str] = Field(
        description="Drafters that selectors choose from; `plain` makes plain decoding an arm.", min_length=2
    )
    generalist: str = Field(description="The one-size-fits-all drafter that the others are compared with.")
    streams: list[str] = Field(
        default=["heldout"],
        description="Streams of `decode` and `replay` that it is replayed on; `heldout`: all held-out answers.",
        min_length=1,
    )
    selectors: list[str] | Literal["all"] = Field("all", description="Selectors that are replayed, by name.")


class Bootstrap(Strict):
    """Intervals over prompts."""

    n_resamples: int = Field(2000, description="Bootstrap resamples.", ge=100)
    confidence: float = Field(0.95, description="Coverage.", gt=0.5, lt=1.0)
    seed: int = Field(0, description="Seed of the resampling.")


class Compare(Strict):
    """A paired comparison of two recipes, seeds averaged within a prompt."""

    a: str = Field(description="Recipe.")
    b: str = Field(description="Recipe it is compared with.")


class Study(Strict):
    """A whole study."""

    experiment: str = Field(
        description="Name of the study; its tables and figures lie in `results/<experiment>/`."
    )
    seed: int = Field(0, description="Seed of prompt sampling.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: a GPU where there is one.")
    threads: int | None = Field(
        None, description="Cores per heavy job; null: all that snakemake may use.", ge=1
    )
    target: Target = Field(description="The target model.")
    archives: dict[str, Archive] = Field(description="Pinned packages that prompts are read from.")
    domains: dict[str, Domain] = Field(description="Prompt domains.", min_length=1)
    evaluation_domains: list[str] | None = Field(
        None,
        description="Domains that drafters are compared on: means, the gate, costs, `all` of streams and prompt sets. "
        "Null: those with training prompts.",
        min_length=1,
    )
    prompt_sets: dict[str, PromptSet] = Field(
        default={},
        description="Held-out prompts reworded, sampled, or joined to sessions; streams name them.",
    )
    responses: Responses = Field(default=Responses(), description="The target's answers.")
    drafter_defaults: dict[str, Any] = Field(default={}, description="Blocks that every recipe starts from.")
    drafters: dict[str, Recipe] = Field(description="Recipes.", min_length=1)
    sweeps: dict[str, Sweep] = Field(default={}, description="Variations of recipes.")
    pool: list[str] = Field(default=[], description="Drafters that selectors choose from.")
    generalist: str = Field(description="The one-size-fits-all drafter of comparisons.")
    pools: dict[str, Pool] = Field(default={}, description="Further pools, replayed as the main one is.")
    selectors: dict[str, dict[str, Any]] = Field(
        default={}, description="Name -> `kind` and parameters (docs/add-a-selector.md)."
    )
    decode: Decode = Field(default=Decode(), description="Live decoding.")
    profile: Profile | None = Field(
        None, description="Write Chrome traces of single answers, and split a round's time; null: do not."
    )
    lossless: Lossless = Field(default=Lossless(), description="Losslessness gate.")
    score: Score = Field(default=Score(), description="Acceptance table.")
    replay: Replay | None = Field(None, description="Exact replay; null: none.")
    bootstrap: Bootstrap = Field(default=Bootstrap(), description="Intervals.")
    compare: list[Compare] = Field(default=[], description="Paired comparisons of recipes.")

    @field_validator("experiment")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError("must be lower-case letters, digits and underscores, starting with a letter")
        return value

    @field_validator("archives", "domains", "drafters", "sweeps", "selectors", "prompt_sets", "pools")
    @classmethod
    def _keys_are_names(cls, value: dict) -> dict:
        return named(value)
