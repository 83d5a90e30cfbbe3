"""The command line: flags, exit states, and imports that stay light."""

from __future__ import annotations

import importlib
import inspect
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftpool import cli
from draftpool.config import plan  # noqa: F401 (pydantic imports lazily, which the recorder would catch)
from draftpool.errors import DraftpoolError

REPOSITORY = Path(__file__).resolve().parents[2]

# What each stage is called with, beside --cfg and --out.
FLAGS = {
    "fetch_target": [],
    "prepare_prompts": [],
    "prepare_set": ["--prompts", "p", "q", "--model", "m"],
    "generate_responses": ["--target", "t", "--prompts", "p"],
    "train_drafter": ["--target", "t", "--responses", "a", "b", "--init", "i", "--state", "s"],
    "check_lossless": ["--target", "t", "--prompts", "p", "--drafters", "d"],
    "score_pool": ["--target", "t", "--responses", "a", "--drafters", "d", "e", "--state", "s"],
    "decode_live": ["--target", "t", "--prompts", "p", "--drafters", "d", "--lossless", "l", "--state", "s"],
    "profile_decode": ["--target", "t", "--prompts", "p", "--drafters", "d"],
    "make_drafter": ["--responses", "a"],
    "fetch_drafter": ["--target", "t"],
    "profile_costs": ["--target", "t", "--responses", "a", "--drafters", "d"],
    "train_router": ["--prompts", "p", "--train", "a", "--heldout_prompts", "p", "--heldout", "b"],
    "replay_selectors": ["--acceptance", "a", "--costs", "c", "--responses", "r", "--routes", "q"],
    "judge_claims": ["--stats", "t"],
    "compute_stats": ["--acceptance", "a", "--training", "d", "--lossless", "l", "--responses", "r"],
}


@pytest.fixture
def stage_calls(monkeypatch):
    """Replace every stage by a recorder; a call is the pair of its cfg and its other arguments."""
    calls = []

    class Recorder:
        def __getattr__(self, name):
            def stage(cfg, **arguments):
                calls.append((name, cfg, arguments))

            return stage

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Recorder())
    return calls


@pytest.mark.parametrize("stage", cli.STAGES)
def test_flags_of_a_stage_are_the_parameters_of_its_function(stage, stage_calls):
    assert cli.main([stage, "--cfg", '{"a": 1}', *FLAGS[stage], "--out", "o"]) == 0
    ((name, cfg, arguments),) = stage_calls
    assert cfg == {"a": 1} and arguments["out"] == Path("o")
    module, function = cli.STAGES[stage].split(":")
    assert name == function
    source = (REPOSITORY / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
    signature = source.split(f"def {function}(", 1)[1].split(") ->", 1)[0]
    parameters = [part.split(":")[0].strip() for part in signature.split(",") if ":" in part]
    assert set(arguments) | {"cfg"} == set(parameters)


def test_flags_without_value_mean_nothing_given(stage_calls):
    flags = ["--target", "t", "--responses", "a", "--init", "--state", "s"]
    assert cli.main(["train_drafter", "--cfg", "{}", *flags, "--out", "o"]) == 0
    assert cli.main(["compute_stats", "--cfg", "{}", "--decodes", "--lossless", "--out", "o"]) == 0
    assert stage_calls[0][2]["init"] is None and stage_calls[0][2]["responses"] == [Path("a")]
    assert stage_calls[1][2]["lossless"] is None and stage_calls[1][2]["decodes"] == []


def test_d44_a_resolved_configuration_feeds_back_into_its_stage(stage_calls, tmp_path):
    cfg = {"lr": 1e-4, "seed": 3, "domains": ["maths"]}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(cfg))
    assert cli.main(["fetch_target", "--cfg", f"@{tmp_path / 'resolved.yaml'}", "--out", "o"]) == 0
    assert stage_calls[0][1] == cfg


@pytest.mark.parametrize("text", ["{", "[1]", "3", ""])
def test_a_bad_cfg_is_one_line(text, capsys):
    assert cli.main(["fetch_target", "--cfg", text, "--out", "o"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("draftpool: error: flag --cfg: not a JSON object") and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DraftpoolError("wrong", "here", "mend it"), 2, "draftpool: error: here: wrong -> mend it\n"),
        (KeyboardInterrupt(), 130, "draftpool: interrupted; run the same command again to go on\n"),
        (OSError(28, "No space left on device"), 2, "the disk is full -> free some space"),
    ],
)
def test_errors_become_one_line_and_an_exit_status(monkeypatch, capsys, error, status, message):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["check_config", "x.yaml"]) == status
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


def test_programming_errors_keep_their_traceback(monkeypatch):
    def fail(arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["check_config", "x.yaml"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_jobs_say_so_and_leave_nothing_half_written(tmp_path, number):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom draftpool import artefacts, cli\n"
        "def run(arguments):\n"
        "    with artefacts.atomic_dir(Path(sys.argv[1]) / 'folder') as temporary:\n"
        "        (temporary / 'file').write_text('half')\n"
        "        print('ready', flush=True)\n        time.sleep(60)\n"
        "cli._run = run\nsys.exit(cli.main(['check_config', 'x.yaml']))\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout.readline() == "ready\n"
    job.send_signal(number)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 130 and "interrupted; run the same command again" in errors
    assert list(tmp_path.iterdir()) == []


def test_check_config_says_yes_or_why_not(capsys, tmp_path):
    tiny = REPOSITORY / "tests/workflow/config.yaml"
    assert cli.main(["check_config", str(tiny)]) == 0
    assert capsys.readouterr().out == "configuration is valid\n"
    (tmp_path / "overlay.yaml").write_text("pool: [nobody]\n")
    assert cli.main(["check_config", str(tiny), str(tmp_path / "overlay.yaml")]) == 2
    assert "config key `pool`: unknown drafter `nobody`" in capsys.readouterr().err


LIGHT = (
    ["draftpool.cli", "draftpool.config.plan", "draftpool.config.stages", "draftpool.config.overview"]
    + ["draftpool.analysis.stats", "draftpool.selectors.metasd", "draftpool.training.objectives.dpace"]
    + [f"draftpool.{kind}" for kind in ("figures", "tables")]
)


@pytest.mark.parametrize("module", LIGHT)
def test_planning_statistics_and_selectors_never_import_torch(module):
    code = f"import sys, {module}\nsys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kind", ["figures", "tables"])
def test_figures_and_tables_never_import_torch(kind):
    listed = importlib.import_module(f"draftpool.{kind}")
    names = getattr(listed, kind.upper())
    imports = ", ".join(f"draftpool.{kind}.{name}" for name in names)
    code = f"import sys, {imports}\nsys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    function = {"figures": "draw", "tables": "write"}[kind]
    for name in names:
        module = importlib.import_module(f"draftpool.{kind}.{name}")
        assert list(inspect.signature(getattr(module, function)).parameters) == ["stats", "out"]


def test_help_names_every_stage():
    done = subprocess.run([sys.executable, "-m", "draftpool.cli", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and all(stage in done.stdout for stage in cli.STAGES)
