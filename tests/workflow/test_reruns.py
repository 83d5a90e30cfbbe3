"""Which jobs run again after which edit: golden lists over `snakemake -n` of a finished study (D-42)."""

from __future__ import annotations

import ast
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NOTHING = Counter()
FETCH = ["Fetching the target model: tinyllama"]
# The prompt sets are made of held-out prompts of maths, one of them of stories as well.
PROMPTS = [
    "Preparing prompts: maths",
    *(f"Preparing a prompt set: {name}" for name in ("drawn", "slips", "talks")),
]
OUTSIDE = [f"Generating the target's answers: {name}-eval" for name in ("stories", "drawn", "slips", "talks")]
ANSWERS = [
    "Generating the target's answers: maths-train",
    "Generating the target's answers: maths-eval",
    *(answers for answers in OUTSIDE if "stories" not in answers),
]
BASELINE = ["Training drafter dflash-mixed-s0"]
# general-s0, the sweep's depth_l2-s0, general-s1, and the specialist that starts from general-s0.
GENERAL = ["Training drafter dpace-mixed-s0"] * 2 + ["Training drafter dpace-mixed-s1"]
SPECIAL = ["Training drafter dpace-maths-s0"]
LOSSLESS = ["Checking losslessness: lossless"]
SCORE = ["Scoring all drafters: acceptance"]
DECODE = ["Decoding live: mixed-float32"]
COSTS = ["Measuring the costs of a round"]
REPLAY = ["Replaying selectors"]
FIGURES = [
    f"Drawing figure {name}"
    for name in (
        "ablations",
        "arm_choice",
        "heatmap_tau",
        "leaderboard",
        "objectives",
        "prediction",
        "regret_curves",
        "selectors",
        "streams",
        "surrogate",
        "time_split",
        "training_dynamics",
    )
]
TABLES = [
    f"Writing table {name}_table"
    for name in ("dpace", "drafters", "headroom", "leaderboard", "metasd", "objectives", "streams")
]
TRACE = ["Tracing provenance"]
STATS = [
    "Computing statistics",
    "Copying summary.json",
    "Judging published claims",
    *FIGURES,
    *TABLES,
    *TRACE,
]
BELOW_DRAFTERS = [*LOSSLESS, *SCORE, *DECODE, *REPLAY, *STATS]
BELOW_POOL = [*COSTS, *BELOW_DRAFTERS]

NEW_SELECTOR = '''
"""A selector of a user's own."""

from draftpool.selectors.base import register_selector
from draftpool.selectors.fixed import Random


@register_selector("mine")
class Mine(Random):
    """Random under another name."""
'''


def reversed_keys(value):
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


def edit_words(source: Path) -> None:
    """Change comments, layout and the module's docstring, but no code."""
    text = source.read_text(encoding="utf-8")
    if ast.get_docstring(ast.parse(text)):
        text = text.replace('"""', '"""In other words: ', 1)
    source.write_text(text + "\n\n# An afterthought.\n", encoding="utf-8")


def test_d42_nothing_reruns_in_a_copy_or_after_touching_files(finished):
    assert finished.jobs() == NOTHING
    later = time.time() + 3600
    for path in [
        *finished.root.glob("src/**/*.py"),
        *finished.root.glob("workflow/**/*"),
        finished.root / "Snakefile",
    ]:
        os.utime(path, (later, later))
    os.utime(finished.root / "config/default.yaml", (later, later))
    assert finished.jobs() == NOTHING


def test_d42_nothing_reruns_after_edited_comments_docstrings_and_key_order(finished):
    sources = list(finished.root.glob("src/**/*.py"))
    assert len(sources) > 20
    for source in sources:
        edit_words(source)
    finished.write_config(reversed_keys(finished.read_config()))
    assert finished.jobs() == NOTHING


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"drafters": {"baseline": {"training": {"steps": 5}}}},
            [*BASELINE, *BELOW_DRAFTERS],
            id="steps of one recipe",
        ),
        pytest.param(
            {"drafters": {"general": {"training": {"steps": 5}}}},
            [*GENERAL, *SPECIAL, *BELOW_POOL],
            id="steps of a recipe that others start from",
        ),
        pytest.param(
            {"drafters": {"special": {"objective": {"alpha": 0.25}}}},
            [*SPECIAL, *BELOW_POOL],
            id="parameter of an objective",
        ),
        pytest.param(
            {"bootstrap": {"n_resamples": 300, "seed": 200}}, STATS, id="option of the statistics alone"
        ),
        pytest.param(
            {"decode": {"max_new_tokens": 32}},
            # Answers inside sessions are as long as live ones.
            ["Generating the target's answers: talks-eval", *SCORE, *DECODE, *REPLAY, *STATS],
            id="length of live decoding",
        ),
        pytest.param(
            {"domains": {"maths": {"eval": 5}}},
            [*PROMPTS, *ANSWERS, *BASELINE, *GENERAL, *SPECIAL, *BELOW_POOL],
            id="prompts",
        ),
        pytest.param(
            {"prompt_sets": {"slips": {"rate": 0.5}}},
            [
                "Preparing a prompt set: slips",
                "Generating the target's answers: slips-eval",
                *SCORE,
                *REPLAY,
                *STATS,
            ],
            id="a prompt set",
        ),
        pytest.param({"threads": 2}, [], id="option that changes no result"),
        pytest.param(
            {"drafters": {"general": {"training": {"processes": 2}}}}, [], id="how a training is split"
        ),
    ],
)
def test_d42_one_option_reruns_what_depends_on_it(finished_checkout, changes, expected):
    assert finished_checkout.jobs(*finished_checkout.overlay(changes)) == Counter(expected)


def test_d42_swapped_parameters_of_one_job_are_seen(finished):
    finished.run(*finished.overlay({"bootstrap": {"n_resamples": 300, "seed": 200}}))
    assert finished.jobs(*finished.overlay({"bootstrap": {"n_resamples": 200, "seed": 300}})) == Counter(
        STATS
    )


def test_d44_an_overlay_sets_keys_that_the_base_lacks(finished_checkout):
    assert "score" not in finished_checkout.read_config()
    score = finished_checkout.overlay({"score": {"prompts_per_domain": 2}})
    assert finished_checkout.jobs(*score) == Counter([*SCORE, *REPLAY, *STATS])
    taps = finished_checkout.overlay({"target": {"taps": [0, 1]}})
    trained = [*BASELINE, *GENERAL, *SPECIAL]
    assert finished_checkout.jobs(*taps) == Counter([*ANSWERS, OUTSIDE[0], *trained, *BELOW_POOL])


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["training/train.py"], [*BASELINE, *GENERAL, *SPECIAL, *BELOW_POOL]),
        (["training/objectives/decay.py"], [*BASELINE, *BELOW_DRAFTERS]),
        (["replay/oracles.py"], [*REPLAY, *STATS]),
        (["analysis/stats.py"], STATS),
        (["figures/heatmap_tau.py", "figures/__init__.py"], ["Drawing figure heatmap_tau", *TRACE]),
        (["provenance/tree.py"], TRACE),
        (["provenance/record.py"], []),  # what is recorded decides nothing
        (["selectors/exp3.py", "cli.py", "config/overview.py"], []),  # used by no job of this study
    ],
)
def test_d42_one_line_of_code_reruns_what_uses_it(finished, sources, expected):
    for source in sources:
        finished.append(source, "\nADDED = 1\n")
    assert finished.jobs() == Counter(expected)


def test_d42_what_stands_upstream_is_made_first_and_then_the_rest_follows(finished):
    finished.append("training/train.py", "\nADDED = 1\n")
    finished.run("drafters")
    assert finished.jobs() == Counter(BELOW_POOL)


def test_d42_a_selector_of_ones_own_is_one_class_and_one_line(finished):
    (finished.root / "src/draftpool/selectors/mine.py").write_text(NEW_SELECTOR)
    assert finished.jobs() == NOTHING
    overlay = finished.overlay({"selectors": {"mine": {"kind": "mine"}}})
    finished.run(*overlay)
    assert finished.jobs(*overlay) == NOTHING
    finished.append("selectors/mine.py", "\nADDED = 1\n")
    assert finished.jobs(*overlay) == Counter([*DECODE, *REPLAY, *STATS])


def test_a_drafter_of_ones_own_is_one_class_and_one_line(finished):
    page = (REPOSITORY / "docs/add-a-drafter.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    (finished.root / "src/draftpool/drafters/echo.py").write_text(code)
    assert finished.jobs() == NOTHING
    overlay = finished.overlay({"drafters": {"echo": {"kind": "echo", "draft_tokens": 2}}})
    made = finished.jobs(*overlay)
    # All drafters are scored; the pool and live decoding are as before.
    assert made == Counter(["Making drafter echo", *SCORE, *REPLAY, *STATS])
    finished.run(*overlay)
    finished.append("drafters/echo.py", "\nADDED = 1\n")
    assert finished.jobs(*overlay) == Counter([*SCORE, *REPLAY, *STATS])
    wrong = finished.overlay({"drafters": {"echo": {"kind": "ekho"}}})
    done = finished.snakemake("-n", *wrong)
    assert done.returncode != 0 and "unknown kind of drafter; known: block" in done.stdout + done.stderr
