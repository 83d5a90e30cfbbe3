"""Configuration: defaults, overlays, and one clear line for every mistake."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from draftpool.config import reference
from draftpool.config.load import load, merge, read_yaml, resolve
from draftpool.config.models import Study
from draftpool.config.plan import Plan
from draftpool.config.stages import check_kinds
from draftpool.errors import DraftpoolError

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "tests/workflow/config.yaml"
# Those in `scaling/` are laid over other overlays.
OVERLAYS = sorted(
    path
    for path in (REPOSITORY / "config").rglob("*.yaml")
    if path.stem != "claims" and path.parent.name != "scaling"
)


@pytest.fixture
def raw() -> dict:
    return read_yaml(TINY)


def complaint(raw: dict) -> str:
    """Return what a user reads."""
    with pytest.raises(DraftpoolError) as caught:
        plan = Plan(resolve(raw))
        check_kinds(plan)
        plan.by_stage()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(raw: dict, key: str, value) -> dict:
    """Set one key, given with dots."""
    raw = copy.deepcopy(raw)
    *parents, last = key.split(".")
    at = raw
    for parent in parents:
        at = at.setdefault(parent, {})
    at[last] = value
    return raw


MISTAKES = {
    "misspelt key": (
        "expriment",
        "x",
        ["config key `expriment`", "unknown key", "did you mean `experiment`?"],
    ),
    "misspelt nested key": (
        "drafters.general.training",
        {"stepz": 3},
        ["config key `drafters.general.training.stepz`", "unknown key", "did you mean `steps`?"],
    ),
    "unknown key like no other": (
        "responses",
        {"qqq": 3},
        ["config key `responses.qqq`", "known keys here: max_new_tokens, max_prompt_tokens, batch_sequences"],
    ),
    "text for a number": (
        "drafters.general.training",
        {"steps": "many"},
        ["config key `drafters.general.training.steps`", "valid integer", "'many'", "config/README.md"],
    ),
    "number for text": ("experiment", 3, ["config key `experiment`", "valid string", "found 3"]),
    "fraction for an integer": ("bootstrap.seed", 0.5, ["config key `bootstrap.seed`", "integer", "0.5"]),
    "YAML 1.1 number": (
        "drafters.general.training",
        yaml.safe_load("lr: 1e-4"),
        [
            "config key `drafters.general.training.lr`",
            "'1e-4' is text in YAML 1.1, not a number",
            "for example 1.0e-04",
        ],
    ),
    "out of range": (
        "bootstrap.confidence",
        1.5,
        ["config key `bootstrap.confidence`", "less than 1", "1.5"],
    ),
    "wrong choice": ("device", "gpu", ["config key `device`", "'auto', 'cpu' or 'cuda'", "found 'gpu'"]),
    "bad name": ("experiment", "My Study", ["config key `experiment`", "lower-case letters"]),
    "bad name of a drafter": (
        "drafters.Big/one",
        {"seeds": [0]},
        ["config key `drafters`", "'Big/one'", "lower-case letters"],
    ),
    "source without its field": (
        "target.source",
        "hub",
        ["config key `target`", "`source: hub` needs `model_id`"],
    ),
    "unknown drafter in the pool": (
        "pool",
        ["general-s0", "genral-s0"],
        ["config key `pool`", "unknown drafter `genral-s0`", "known drafters: baseline-s0, general-s0"],
    ),
    "generalist outside the pool": (
        "generalist",
        "baseline-s0",
        ["config key `pool`", "the generalist is not in the pool", "add `baseline-s0`"],
    ),
    "unknown start": (
        "drafters.special.init",
        "general",
        ["config key `drafters.special.init`", "unknown drafter `general`", "known drafters: "],
    ),
    "circular start": (
        "drafters.general.init",
        "special_maths-s0",
        ["start from each other in a circle", "`drafters.general.init`", "start one from `target_layers`"],
    ),
    "two drafters of one name": (
        "drafters.special_maths",
        {"seeds": [0]},
        ["`drafters.special_maths`", "`special_maths-s0` is already made by `drafters.special`", "rename"],
    ),
    "unknown archive": (
        "domains.maths.sources",
        [{"source": "archive", "archive": "bag", "subset": "bag", "split": "both", "licence": "MIT"}],
        ["config key `domains.maths.sources`", "unknown archive `bag`", "known: pack"],
    ),
    "unknown domain of a recipe": (
        "drafters.general.domains",
        ["math"],
        ["config key `drafters.general.domains`", "unknown domain `math`", "known: maths"],
    ),
    "unknown domain of a stream": (
        "decode.streams.mixed.domains",
        ["code"],
        ["config key `decode.streams.mixed.domains`", "unknown domain `code`", "known: maths"],
    ),
    "no training prompts": (
        "domains.maths.train",
        0,
        ["config key `domains.maths.train`", "no training prompts"],
    ),
    "unknown recipe in a comparison": (
        "compare",
        [{"a": "general", "b": "generl"}],
        ["config key `compare`", "unknown recipe `generl`", "known: baseline, depth_l2, general"],
    ),
    "unknown recipe in a sweep": (
        "sweeps.depth.base",
        "generl",
        ["config key `sweeps.depth.base`", "unknown recipe `generl`", "known: baseline, general, special"],
    ),
    "unknown key in a sweep": (
        "sweeps.depth.over.l2",
        {"model": {"layers": 2}},
        ["sweeps.depth.over.l2", "model.layers", "unknown key"],
    ),
    "unknown key of a prompt set": (
        "prompt_sets.reworded",
        {"kind": "sampled", "rate": 0.1},
        ["config key `prompt_sets.reworded.rate`", "unknown key", "known keys here: ", "temperature"],
    ),
    "misspelt key of a prompt set": (
        "prompt_sets.slips",
        {"kind": "reworded", "how": "typos", "rat": 0.1},
        ["config key `prompt_sets.slips.rat`", "did you mean `rate`?"],
    ),
    "unknown kind of prompt set": (
        "prompt_sets.slips",
        {"kind": "reword"},
        ["config key `prompt_sets.slips`", "'reworded'", "'sessions'"],
    ),
    "live decoding without a pool": ("pool", [], ["config key `pool`", "live decoding needs a pool"]),
    "unknown objective": (
        "drafters.general.objective",
        {"kind": "dpaze"},
        ["drafter `general-s0`", "unknown objective 'dpaze'", "use one of: ", "dpace"],
    ),
    "unknown parameter of an objective": (
        "drafters.baseline.objective.alpha",
        0.5,
        ["drafter `baseline-s0`", "objective dflash", "unknown parameter 'alpha'", "it takes: "],
    ),
    "unknown selector": (
        "selectors.ucb.kind",
        "ucb",
        ["config key `selectors.ucb`", "unknown selector 'ucb'", "use one of: ", "metasd_ucb"],
    ),
    "unknown parameter of a selector": (
        "selectors.ucb.betta",
        0.5,
        ["config key `selectors.ucb`", "unknown parameter 'betta'", "it takes: ", "beta"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_key_and_remedy(raw, mistake):
    key, value, expected = MISTAKES[mistake]
    message = complaint(changed(raw, key, value))
    assert all(part in message for part in expected), message


def test_a_missing_key_is_named(raw):
    del raw["target"]
    assert complaint(raw) == "config key `target`: is missing -> add it; config/README.md says what it is"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2", "not valid YAML in line 1 -> check indentation and quotes"),
        ("- 1\n- 2\n", "must hold `key: value` pairs"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, expected):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(DraftpoolError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value) and expected in str(caught.value)
    with pytest.raises(DraftpoolError, match="no such configuration file"):
        read_yaml(tmp_path / "none.yaml")


def test_d44_overlays_merge_mappings_and_replace_everything_else():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merge(base, {"a": {"c": [3]}, "e": {"f": 4}}) == {"a": {"b": 1, "c": [3]}, "d": 3, "e": {"f": 4}}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merge({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


def test_recipes_start_from_the_defaults_but_not_with_parameters_of_another_objective(raw):
    raw["drafter_defaults"]["objective"] = {"kind": "dpace", "alpha": 0.5, "reduction": "sequence_sum"}
    raw["drafters"]["special"]["objective"] = {"alpha": 0.3}
    drafters = resolve(raw).drafters
    assert drafters["general"].training.steps == 4 and drafters["special"].training.steps == 6
    assert drafters["general"].training.weight_decay == 0.01  # the model's default
    assert drafters["special"].objective.model_dump() == {
        "kind": "dpace",
        "alpha": 0.3,
        "reduction": "sequence_sum",
    }
    assert drafters["baseline"].objective.model_dump() == {"kind": "dflash", "reduction": "sequence_sum"}


def test_a_resolved_study_resolves_to_itself(raw):
    study = resolve(raw)
    again = yaml.safe_load(yaml.safe_dump(study.model_dump()))
    assert resolve(again) == study


@pytest.mark.parametrize("overlay", OVERLAYS, ids=[path.name for path in OVERLAYS])
def test_every_configuration_of_the_repository_is_valid(overlay):
    plan = Plan(load(REPOSITORY / "config/default.yaml", overlay))
    check_kinds(plan)
    assert plan.by_stage()["train_drafter"]


def test_reference_is_in_step_with_the_models(tmp_path):
    reference.write_reference(tmp_path)
    for name in ("README.md", "schema.json"):
        committed = (REPOSITORY / "config" / name).read_text()
        assert (tmp_path / name).read_text() == committed, "run `draftpool write_config_docs`"


def test_reference_describes_every_option_and_its_schema_names_its_dialect():
    text = reference.readme()
    for model in reference._models(Study, {}).values():
        for key, option in model.model_fields.items():
            assert option.description, f"{model.__name__}.{key} has no description"
            assert f"| `{key}` |" in text
    schema = reference.schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False


def test_d44_an_overlay_leaves_out_what_it_sets_to_null():
    study = load(REPOSITORY / "config/default.yaml", REPOSITORY / "config/objectives.yaml")
    assert "specialist" in read_yaml(REPOSITORY / "config/default.yaml")["drafters"]
    assert "specialist" not in study.drafters
    assert study.decode.streams == {}
    assert Plan(study).decodes == {}
