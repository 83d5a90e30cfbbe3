"""The plan: ids, what changes them, and which artefact reads which."""

from __future__ import annotations

import copy
import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draftpool.artefacts import canonical_json
from draftpool.config import environment, hardware, overview
from draftpool.config.ids import ID_PATTERN, make_id
from draftpool.config.load import merge, read_yaml, resolve
from draftpool.config.plan import Plan
from draftpool.config.stages import check_kinds
from draftpool.errors import DraftpoolError

TINY = read_yaml(Path(__file__).resolve().parents[1] / "workflow/config.yaml")


def plan_of(changes: dict | None = None) -> Plan:
    return Plan(resolve(merge(copy.deepcopy(TINY), changes or {})))


def ids(plan: Plan) -> dict[str, set[str]]:
    return {stage: set(made) for stage, made in plan.by_stage().items()}


def changed_stages(changes: dict) -> set[str]:
    before, after = ids(plan_of()), ids(plan_of(changes))
    return {stage for stage in before if before[stage] != after[stage]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text(), st.dictionaries(st.text(), json_values, max_size=4))
def test_ids_fit_paths_and_do_not_depend_on_the_order_of_keys(slug, fields):
    made = make_id(slug, fields)
    assert re.fullmatch(ID_PATTERN, made)
    assert made == make_id(slug, dict(reversed(fields.items())))


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), min_size=2))
def test_ids_tell_values_apart_even_when_they_are_swapped(fields):
    names = list(fields)
    swapped = fields | {names[0]: fields[names[1]], names[1]: fields[names[0]]}
    assert (make_id("x", fields) == make_id("x", swapped)) == (fields == swapped)


def test_every_id_of_a_study_is_a_name_without_slash():
    found = plan_of(
        {"profile": {"methods": ["plain"]}, "replay": {"selectors": {"r": {"kind": "router"}}}}
    ).by_stage()
    # The study trains all its drafters.
    assert [stage for stage, made in found.items() if not made] == ["make_drafter", "fetch_drafter"]
    for made in found.values():
        for id, artefact in made.items():
            assert id == artefact.id and re.fullmatch(ID_PATTERN, id)
            canonical_json(artefact.cfg)


REPLAYED = {"profile_costs", "replay_selectors"}
DRAFTERS_AND_BELOW = REPLAYED | {"train_drafter", "check_lossless", "score_pool", "decode_live"}
PROMPTS = {"prepare_prompts", "prepare_set"}
# What a prompt set or a domain without training prompts reaches.
OUTSIDE = {"generate_responses", "score_pool", "replay_selectors"}
ANSWERS_AND_BELOW = DRAFTERS_AND_BELOW | {"generate_responses"}


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({"target": {"path": "models/other"}}, ANSWERS_AND_BELOW | {"fetch_target"}),
        ({"target": {"taps": [0, 1]}}, ANSWERS_AND_BELOW),
        ({"target": {"backend": "transformers"}}, ANSWERS_AND_BELOW),
        ({"domains": {"maths": {"max_prompt_chars": 10}}}, ANSWERS_AND_BELOW | PROMPTS),
        ({"domains": {"stories": {"eval": 3}}}, OUTSIDE | PROMPTS),
        ({"archives": {"pack": {"sha256": "1" * 64}}}, ANSWERS_AND_BELOW | PROMPTS),
        ({"prompt_sets": {"slips": {"rate": 0.4}}}, OUTSIDE | {"prepare_set"}),
        ({"prompt_sets": {"drawn": {"repeats": 3}}}, OUTSIDE),
        ({"replay": {"streams": {"abroad": {"seed": 3}}}}, {"replay_selectors"}),
        ({"responses": {"max_new_tokens": 9}}, ANSWERS_AND_BELOW),
        ({"drafters": {"general": {"objective": {"alpha": 0.1}}}}, DRAFTERS_AND_BELOW),
        ({"lossless": {"max_new_tokens": 9}}, {"check_lossless"}),
        ({"score": {"prompts_per_domain": 1}}, {"score_pool", "replay_selectors"}),
        ({"decode": {"repeats": 2}}, {"decode_live"}),
        ({"decode": {"selector_seeds": [0, 1]}}, {"decode_live"}),
        ({"selectors": {"ucb": {"reward": "bd"}}}, {"decode_live", "replay_selectors"}),
        ({"replay": {"seeds": 4}}, {"replay_selectors"}),
        ({"replay": {"cost_repeats": 9}}, REPLAYED),
        ({"experiment": "other", "threads": 7, "bootstrap": {"n_resamples": 100}}, set()),
        ({"drafters": {"general": {"training": {"checkpoint_every": 1}}}}, DRAFTERS_AND_BELOW),
        ({"archives": {"unused": TINY["archives"]["pack"] | {"package": "unused"}}}, set()),
    ],
)
def test_d49_an_id_changes_with_what_its_stage_reads_and_with_nothing_else(changes, stages):
    assert changed_stages(changes) == stages


def test_a_recipe_can_be_renamed_without_training_again():
    renamed = copy.deepcopy(TINY)
    renamed["drafters"]["baseline_of_old"] = renamed["drafters"].pop("baseline")
    renamed["compare"] = [{"a": "general", "b": "baseline_of_old"}]
    assert set(Plan(resolve(renamed)).by_stage()["train_drafter"]) == ids(plan_of())["train_drafter"]


def test_a_prompt_set_is_told_what_it_is_made_of():
    plan = plan_of({"prompt_sets": {"said": {"kind": "reworded", "how": "llm"}}})
    assert plan.trained_domains == ["maths"] and list(plan.responses) == [
        ("maths", "train"), ("maths", "eval"), ("stories", "eval"),
        ("drawn", "eval"), ("said", "eval"), ("slips", "eval"), ("talks", "eval"),
    ]  # fmt: skip
    assert plan.prompt_sets["said"].inputs["model"] == plan.target.id
    assert plan.prompt_sets["slips"].inputs["model"] is None
    assert plan.responses["drawn", "eval"].cfg["temperature"] == 1.0
    # Answers inside a conversation are as long as live ones.
    assert plan.responses["talks", "eval"].cfg["max_new_tokens"] == plan.study.decode.max_new_tokens
    temperatures = {answers["name"]: answers["temperature"] for answers in plan.score.cfg["answers"]}
    assert temperatures["drawn"] == 1.0 and set(temperatures.values()) == {0.0, 1.0}
    # Neither the lossless gate nor means over domains meet what no drafter was trained on.
    assert plan.lossless.inputs["prompts"] == [plan.prompts["maths"].id]
    assert plan.stats_cfg["domains"] == ["maths"]
    streams = plan.by_stage()["replay_selectors"].popitem()[1].cfg["streams"]
    assert streams["heldout"]["domains"] == ["maths"] and streams["talks"]["domains"] == ["talks"]
    assert (
        streams["mixed"]["limit"] == plan.study.decode.max_new_tokens and streams["abroad"]["limit"] is None
    )


def test_another_model_that_rewords_is_fetched():
    model = {"name": "other", "source": "path", "path": "models/other"}
    plan = plan_of({"prompt_sets": {"said": {"kind": "reworded", "how": "llm", "model": model}}})
    assert plan.prompt_sets["said"].inputs["model"] in plan.by_stage()["fetch_target"]
    assert plan.prompt_sets["said"].inputs["model"] != plan.target.id


def test_live_streams_of_sets_are_decoded_as_the_sets_were_answered():
    plan = plan_of(
        {"decode": {"streams": {"drawn": {"domains": ["drawn"]}, "talks": {"domains": ["talks"]}}},
         "replay": {"streams": {"talks": None}}, "selectors": {"dear": {"kind": "cost_ucb"}}}
    )  # fmt: skip
    drawn, talks, mixed = (plan.decodes[name, "float32"] for name in ("drawn", "talks", "mixed"))
    assert (drawn.cfg["temperature"], drawn.cfg["repeats"]) == (1.0, 2)
    assert (mixed.cfg["temperature"], talks.cfg["max_prompt_tokens"]) == (0.0, 1024)
    # A selector that weighs costs waits for them.
    assert mixed.inputs["costs"] == list(plan.by_stage()["profile_costs"]) and mixed.inputs["routes"] == []
    sampled = plan_of({"decode": {"temperature": 1.0}}).by_stage()["replay_selectors"].popitem()[1]
    assert "mixed" not in sampled.cfg["streams"]


def test_equal_recipes_share_one_drafter():
    plan = plan_of({"drafters": {"twin": {"seeds": [0]}}})
    assert plan.drafter("twin-s0").id == plan.drafter("general-s0").id
    assert ids(plan)["train_drafter"] == ids(plan_of())["train_drafter"]


def test_specialists_start_from_a_drafter_and_change_with_it():
    before, after = plan_of(), plan_of({"drafters": {"general": {"training": {"steps": 9}}}})
    assert before.drafter("special_maths-s0").inputs["init"] == before.drafter("general-s0").id
    assert before.drafter("special_maths-s0").id != after.drafter("special_maths-s0").id
    assert before.drafter("baseline-s0").id == after.drafter("baseline-s0").id
    assert before.drafter("baseline-s0").inputs["init"] is None


def test_runs_are_recipes_times_domains_times_seeds_and_sweeps():
    plan = plan_of()
    assert list(plan.runs) == ["baseline-s0", "general-s0", "general-s1", "special_maths-s0", "depth_l2-s0"]
    special, swept = plan.runs["special_maths-s0"], plan.runs["depth_l2-s0"]
    assert (special.recipe_name, special.home, special.domains) == ("special_maths", "maths", ["maths"])
    assert (swept.recipe.role, swept.recipe.group, swept.recipe.model.n_layers) == ("sweep", "layers", 2)
    assert plan.live_drafters == ["general-s0", "special_maths-s0", "baseline-s0", "general-s1"]


def test_a_sweep_over_objectives_drops_the_parameters_of_the_base():
    over = {"dflash": {"objective": {"kind": "dflash"}}, "a3": {"objective": {"alpha": 0.3}}}
    plan = plan_of(
        {"sweeps": {"loss": {"base": "general", "group": "objective", "over": over, "seeds": [0]}}}
    )
    assert plan.runs["loss_dflash-s0"].recipe.objective.model_dump() == {
        "kind": "dflash",
        "reduction": "anchor_mean",
    }
    assert plan.runs["loss_a3-s0"].recipe.objective.model_dump()["alpha"] == 0.3


def test_statistics_know_every_drafter_in_the_order_of_their_folders():
    plan = plan_of()
    assert [drafter["name"] for drafter in plan.stats_cfg["drafters"]] == list(plan.runs)
    assert plan.stats_cfg["drafters"][3] == {
        "name": "special_maths-s0",
        "kind": "block",
        "recipe": "special_maths",
        "seed": 0,
        "role": "specialist",
        "home": "maths",
        "objective": {"kind": "dpace", "alpha": 0.5, "reduction": "anchor_mean"},
        "block_size": 4,
        "n_layers": 1,
        "steps": 6,
        "clip": 1.0,
        "group": "",
    }


@pytest.mark.parametrize("native", [True, False])
def test_dtypes_follow_the_processor_unless_they_are_given(monkeypatch, native):
    monkeypatch.setattr(hardware, "cpu_multiplies_bfloat16", lambda: native)
    assert plan_of({"decode": {"dtypes": "auto"}}).dtypes == ["float32", "bfloat16"][: 1 + native]
    assert plan_of({"decode": {"dtypes": ["bfloat16"]}}).dtypes == ["bfloat16"]


@pytest.mark.parametrize(
    ("device", "has_gpu", "uses"),
    [("auto", True, True), ("auto", False, False), ("cpu", True, False), ("cuda", False, True)],
)
def test_a_gpu_is_asked_for_where_there_is_one_or_where_it_is_wanted(monkeypatch, device, has_gpu, uses):
    monkeypatch.setattr(hardware, "has_gpu", lambda: has_gpu)
    assert hardware.uses_gpu(device) is uses


def test_d44_index_keeps_other_studies_and_resolved_yaml_holds_what_runs(tmp_path):
    one, two = (
        plan_of(),
        plan_of({"experiment": "other", "drafters": {"baseline": {"training": {"steps": 9}}}}),
    )
    overview.write_overview(one, tmp_path)
    overview.write_overview(two, tmp_path)
    overview.write_overview(two, tmp_path)
    with (tmp_path / "index.csv").open(newline="") as handle:
        rows = [row["id"] for row in csv.DictReader(handle)]
    expected = {id for plan in (one, two) for made in plan.by_stage().values() for id in made}
    assert len(rows) == len(expected) and set(rows) == expected
    resolved = yaml.safe_load((tmp_path / "other/resolved.yaml").read_text())
    assert resolve(resolved) == two.study
    assert overview.config_hash(one.study) != overview.config_hash(two.study)


def test_d42_an_edited_local_prompt_file_makes_new_prompts(tmp_path):
    rows = tmp_path / "rows.jsonl"
    source = {
        "source": "path",
        "path": str(rows),
        "template": "{q}",
        "subset": "x",
        "split": "both",
        "licence": "MIT",
    }
    domain = {"mine": {"train": 1, "eval": 1, "sources": [source]}}
    ids = []
    for text in ('{"q": "a"}\n', '{"q": "b"}\n', '{"q": "b"}\n'):
        rows.write_text(text)
        ids.append(plan_of({"domains": domain}).prompts["mine"].id)
    assert ids[0] != ids[1] == ids[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selectors": {"c": {"kind": "cost_ucb"}}, "replay": None}, "selectors.c.*costs.*`replay` block"),
        ({"replay": {"selectors": {"c": {"kind": "hedgespc"}}}}, "replay.selectors.c.*unknown selector"),
        (
            {"replay": {"selectors": {"c": {"kind": "exp3", "eta": 1.0}}}},
            "replay.selectors.c.*unknown parameter 'eta'",
        ),
        (
            {"replay": {"selectors": {"ucb": {"kind": "exp3"}}}},
            "replay.selectors.ucb.*decoded live and replayed",
        ),
        ({"replay": {"few": ["nobody"]}}, "replay.few.*unknown selector `nobody`"),
        ({"replay": {"selectors": {"best_switching": {"kind": "exp3"}}}}, "best_switching.*name is taken"),
        ({"decode": {"streams": {"heldout": {}}}, "replay": None}, "decode.streams.heldout.*there already"),
        ({"prompt_sets": {"drawn": {"domains": []}}}, "prompt_sets.drawn.domains.*no domain"),
        ({"replay": {"streams": {"abroad": {"domains": ["maths", "maths"]}}}}, "abroad.domains.*named twice"),
        ({"prompt_sets": {"talks": {"turns": 3}}}, "prompt_sets.talks.*3 turns from 2 domains"),
        (
            {
                "replay": {
                    "selectors": {"f": {"kind": "metasd_ucb", "reward": "bd_full"}},
                    "pool_sizes": {"sizes": [2], "selectors": ["f"]},
                }
            },
            "pool_sizes.selectors.*leave `f` out",
        ),
        ({"prompt_sets": {"maths": {"kind": "sampled"}}}, "prompt_sets.maths.*domain already"),
        ({"replay": {"streams": {"mixed": {}}}}, "replay.streams.mixed.*there already"),
        ({"replay": {"streams": {"heldout": {}}}}, "replay.streams.heldout.*there already"),
        ({"decode": {"streams": {"s": {"domains": ["drawn", "maths"]}}}}, "streams.s.*sampled.*mixed"),
        ({"decode": {"streams": {"s": {"domains": ["talks", "maths"]}}}}, "streams.s.*sessions are mixed"),
    ],
)
def test_selectors_that_cannot_be_are_refused_before_any_job(changes, message):
    with pytest.raises(DraftpoolError) as caught:
        plan = plan_of(changes)
        check_kinds(plan)
        plan.by_stage()
    assert re.search(message, str(caught.value).replace("\n", " "))


def test_replayed_selectors_may_carry_weights_and_weigh_costs():
    kinds = {"a": {"kind": "hedgespec", "carry": True}, "b": {"kind": "cost_hedge"}}
    check_kinds(plan_of({"replay": {"selectors": kinds}}))


def test_jobs_on_other_nodes_plan_the_dtypes_that_the_study_started_with(monkeypatch):
    """A job reads the configuration again where it runs; `dtypes: auto` must not change its ids there."""
    monkeypatch.delenv(hardware.DTYPES_VARIABLE, raising=False)
    monkeypatch.setattr(hardware, "uses_gpu", lambda device: False)
    monkeypatch.setattr(hardware, "cpu_multiplies_bfloat16", lambda: True)
    changes = {"decode": {"dtypes": "auto"}}
    started = plan_of(changes)
    assert started.dtypes == ["float32", "bfloat16"]
    monkeypatch.setenv("PATH", "/nowhere")
    environment.prepare_jobs(started.dtypes)
    monkeypatch.setattr(hardware, "cpu_multiplies_bfloat16", lambda: False)
    assert ids(plan_of(changes)) == ids(started)
    monkeypatch.delenv(hardware.DTYPES_VARIABLE)
    assert plan_of(changes).dtypes == ["float32"]


def test_one_run_holds_the_results_until_it_ends_however_it_ends(tmp_path):
    hold = (
        "import sys, time; from pathlib import Path; from draftpool.config.environment import lock_results\n"
        "lock_results(Path(sys.argv[1])); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "results")], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline()
        with pytest.raises(DraftpoolError, match="another snakemake is working here"):
            environment.lock_results(tmp_path / "results")
        other.kill()
        other.wait(timeout=10)
    environment.lock_results(tmp_path / "results")
