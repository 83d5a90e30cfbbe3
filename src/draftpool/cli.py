"""`draftpool <stage> ...`: parses flags and calls one function per stage. Snakemake rules call these."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from draftpool.artefacts import clear_leftovers
from draftpool.config.environment import split_of
from draftpool.config.hardware import uses_gpu
from draftpool.errors import DraftpoolError, PeerLostError
from draftpool.gpus import claim_gpus, visible_gpus
from draftpool.provenance.record import recorded
from draftpool.provenance.secrets import hide_secrets, mask, mask_command, refuse_logins
from draftpool.training import launch

# Stage -> module and function. Rules take the code digest of the same module.
STAGES = {
    "fetch_target": "draftpool.targets.fetch:fetch_target",
    "prepare_prompts": "draftpool.data.prompts:prepare_prompts",
    "prepare_set": "draftpool.data.prompt_sets:prepare_set",
    "generate_responses": "draftpool.data.responses:generate_responses",
    "train_drafter": "draftpool.training.train:train_drafter",
    "make_drafter": "draftpool.drafters.make:make_drafter",
    "fetch_drafter": "draftpool.drafters.published:fetch_drafter",
    "check_lossless": "draftpool.decoding.lossless:check_lossless",
    "score_pool": "draftpool.replay.score:score_pool",
    "decode_live": "draftpool.decoding.live:decode_live",
    "profile_decode": "draftpool.decoding.profile:profile_decode",
    "profile_costs": "draftpool.decoding.costs:profile_costs",
    "train_router": "draftpool.replay.router:train_router",
    "replay_selectors": "draftpool.replay.run:replay_selectors",
    "compute_stats": "draftpool.analysis.stats:compute_stats",
    "judge_claims": "draftpool.analysis.claims:judge_claims",
}
# Stages that load no torch, so that there are no threads to set.
WITHOUT_TORCH = ("prepare_prompts", "train_router", "replay_selectors", "compute_stats", "judge_claims")


# Scratch folders beside that of a job, which other studies share (decoding/live.py, replay/score.py).
SHARED_SCRATCH = ("live", "score")


def _cfg(text: str) -> dict:
    """Parse ``--cfg``: a JSON object, or ``@resolved.yaml`` of an earlier run of the same stage."""
    if text.startswith("@"):
        from draftpool.config.load import read_yaml

        return read_yaml(Path(text[1:]))
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DraftpoolError(
            f"not a JSON object ({error})", "flag --cfg", "give JSON, or @ and the name of a resolved.yaml"
        ) from error
    if not isinstance(value, dict):
        raise DraftpoolError(
            "not a JSON object", "flag --cfg", "give JSON, or @ and the name of a resolved.yaml"
        )
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftpool", description="Which drafter should write the next block?"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="STAGE")

    def stage(name: str, help_text: str, **flags: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--cfg", required=True, help="stage configuration as JSON, or @FILE.yaml")
        for flag, kind in flags.items():
            many = kind.endswith("s")
            command.add_argument(
                f"--{flag}",
                type=Path,
                required=not many and not kind.startswith("optional"),
                # An empty list of a Snakemake input leaves a flag without a value.
                nargs="*" if many else "?" if kind.startswith("optional") else None,
                default=[] if many else None,
                help=kind,
            )
        command.add_argument("--threads", type=int, default=None, help="cores to use")
        command.add_argument("--out", type=Path, required=True, help="what to write")
        return command

    stage("fetch_target", "fetch the target model and convert it to a safetensors folder")
    stage("prepare_prompts", "read one domain's prompts out of pinned archives")
    stage(
        "prepare_set",
        "reword held-out prompts, or join them to sessions",
        prompts="folders",
        model="optional folder",
    )
    stage("generate_responses", "let the target answer the prompts", target="folder", prompts="folder")
    training = stage(
        "train_drafter",
        "train one drafter",
        target="folder",
        responses="folders",
        init="optional folder",
        state="folder",
    )
    training.add_argument("--processes", type=int, default=None, help="processes that share every step")
    training.add_argument("--accumulate", type=int, default=None, help="micro-batches of every process")
    stage("make_drafter", "write a drafter that is not trained", responses="folders")
    stage("fetch_drafter", "fetch a published drafter", target="folder")
    stage(
        "check_lossless",
        "compare speculative with plain decoding",
        target="folder",
        prompts="folders",
        drafters="folders",
    )
    stage(
        "score_pool",
        "make the acceptance table",
        target="folder",
        responses="folders",
        drafters="folders",
        state="folder",
    )
    stage(
        "decode_live",
        "decode a stream under every selector",
        target="folder",
        prompts="folders",
        drafters="folders",
        lossless="file",
        costs="optional folder",
        routes="optional folder",
        answers="folders",
        state="folder",
    )
    stage(
        "profile_decode",
        "profile one answer per method",
        target="folder",
        prompts="folders",
        drafters="folders",
        costs="optional folder",
        routes="optional folder",
    )
    stage(
        "profile_costs",
        "measure the parts of a round",
        target="folder",
        responses="folders",
        drafters="folders",
    )
    stage(
        "train_router",
        "train classifiers that route prompts",
        prompts="folders",
        train="folders",
        heldout_prompts="folders",
        heldout="folders",
    )
    stage(
        "replay_selectors",
        "replay selectors on the acceptance table",
        acceptance="file",
        costs="folder",
        responses="folders",
        routes="optional folder",
    )
    stage(
        "compute_stats",
        "turn tables into statistics",
        acceptance="files",
        decodes="folders",
        profiles="folders",
        replays="folders",
        training="folders",
        lossless="optional file",
        responses="folders",
        benchmarks="files",
    )
    stage("judge_claims", "give published claims a verdict", stats="folder")
    for name, help_text in (("draw_figure", "draw one figure"), ("write_table", "write one table")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--name", required=True, help="module of the figure or table")
        command.add_argument("--stats", type=Path, required=True, help="folder written by compute_stats")
        command.add_argument(
            "--out",
            type=Path,
            required=True,
            help="PNG (figure) or CSV (table); the other formats lie beside it",
        )
    command = commands.add_parser(
        "write_config_docs", help="write config/schema.json and config/README.md from the models"
    )
    command.add_argument("--out", type=Path, default=Path("config"), help="folder")
    command = commands.add_parser(
        "export_drafter", help="write a block drafter in the layout that z-lab publishes"
    )
    command.add_argument("--drafter", type=Path, required=True, help="drafter folder")
    command.add_argument("--target", type=Path, required=True, help="folder of its target")
    command.add_argument("--out", type=Path, required=True, help="folder to write")
    command = commands.add_parser(
        "provenance", help="print how a result was made, back to the prompts and the target"
    )
    command.add_argument(
        "files", type=Path, nargs="+", help="figure, table, or any artefact or file inside one"
    )
    command.add_argument("--json", action="store_true", help="one JSON object instead of a tree")
    command.add_argument("--out", type=Path, help="write it as an HTML page instead")
    command = commands.add_parser(
        "check_config", help="check configuration files, later ones laid over earlier ones"
    )
    command.add_argument("files", type=Path, nargs="+")
    _add_plan(commands.add_parser("plan", help="estimate jobs, hours, disk and memory of studies"))
    return parser


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        nargs="+",
        action="append",
        metavar="FILE",
        help="configuration files, later ones laid over earlier ones; an overlay alone is laid over "
        "config/default.yaml; once more for another study (default: config/default.yaml)",
    )
    command.add_argument("--gpu", default="h200", help="GPU of studies with `device: cuda`: h200, h100, a100")
    command.add_argument("--answer-tokens", type=float, help="mean tokens of an answer")
    command.add_argument("--prompt-tokens", type=float, help="mean tokens of a prompt")
    command.add_argument("--times", type=int, default=1, help="so many times the prompts and training steps")
    command.add_argument(
        "--shape", action="append", default=[], metavar="MODEL=FILE", help="config.json of a model"
    )
    command.add_argument("--brief", action="store_true", help="print totals of studies, and stages of all")
    command.add_argument("--json", action="store_true", help="print numbers as JSON")


def _run_stage(arguments: argparse.Namespace) -> int:
    flags = dict(vars(arguments))
    argv, command, threads = flags.pop("argv"), flags.pop("command"), flags.pop("threads")
    cfg = _cfg(flags.pop("cfg"))
    refuse_logins(cfg)
    module_name, function_name = STAGES[command].split(":")
    processes = 1
    if command == "train_drafter":
        processes, accumulate = split_of(flags["out"].name)
        processes = flags.pop("processes") or processes
        flags["accumulate"] = flags["accumulate"] or accumulate
    if launch.is_rank():
        launch.end_with_parent()
        return _call(module_name, function_name, command, threads, cfg, flags)
    clear_leftovers(flags["out"].parent, *_scratch(flags.get("state")))
    # A target that is spread lies on all that this job may see.
    gpus = len(visible_gpus()) if cfg.get("device_map") else processes
    # Before anything touches CUDA, which reads the visible devices once.
    claimed = claim_gpus(gpus if "device" in cfg and uses_gpu(cfg["device"]) else 0)
    with claimed, recorded(command, cfg, flags):
        if processes > 1:
            split = ["--processes", str(processes), "--accumulate", str(flags["accumulate"])]
            status = launch.launch([*argv, *split], processes, threads or os.cpu_count() or 1)
            if status:
                # Nothing was made that could be recorded.
                raise SystemExit(status)
            return 0
        return _call(module_name, function_name, command, threads, cfg, flags)


def _scratch(state: Path | None) -> list[Path]:
    """Folders of a stage's scratch results: its own, and those that studies share beside it."""
    if state is None or not state.parent.is_dir():
        return []
    return [state, *(path for kind in SHARED_SCRATCH for path in state.parent.glob(f"{kind}-*"))]


def _call(module: str, function: str, command: str, threads: int | None, cfg: dict, flags: dict) -> int:
    if threads is not None and command not in WITHOUT_TORCH:
        import torch

        torch.set_num_threads(max(1, threads))
    getattr(importlib.import_module(module), function)(cfg, **flags)
    return 0


def _show(arguments: argparse.Namespace, package: str, function: str) -> None:
    """Draw a figure or write a table."""
    known = getattr(importlib.import_module(f"draftpool.{package}"), package.upper())
    if arguments.name not in known:
        raise DraftpoolError(f"no `{arguments.name}`", "flag --name", f"known: {', '.join(known)}")
    module = importlib.import_module(f"draftpool.{package}.{arguments.name}")
    flags = {"stats": arguments.stats, "out": arguments.out}
    clear_leftovers(arguments.out.parent)
    with recorded(arguments.command, {"name": arguments.name}, flags, resolved=False):
        getattr(module, function)(**flags)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command in STAGES:
        return _run_stage(arguments)
    if arguments.command == "draw_figure":
        _show(arguments, "figures", "draw")
    elif arguments.command == "write_table":
        _show(arguments, "tables", "write")
    elif arguments.command == "provenance":
        from draftpool.provenance.chain import tell

        tell(arguments.files, arguments.json, arguments.out)
    elif arguments.command == "write_config_docs":
        from draftpool.config.reference import write_reference

        write_reference(arguments.out)
    elif arguments.command == "export_drafter":
        from draftpool.drafters.published import export_drafter

        flags = {"drafter": arguments.drafter, "target": arguments.target, "out": arguments.out}
        with recorded(arguments.command, {}, flags, resolved=False):
            export_drafter(*flags.values())
    elif arguments.command == "plan":
        from draftpool.estimate.command import print_plan

        print_plan(
            arguments.config or [[Path("config/default.yaml")]],
            arguments.json,
            arguments.brief,
            arguments.shape,
            gpu=arguments.gpu,
            answer_tokens=arguments.answer_tokens,
            prompt_tokens=arguments.prompt_tokens,
            times=arguments.times,
        )
    else:
        from draftpool.config.load import load
        from draftpool.config.plan import Plan
        from draftpool.config.stages import check_kinds

        plan = Plan(load(*arguments.files))
        check_kinds(plan)
        plan.by_stage()
        print("configuration is valid")
    return 0


def _fail(message: str) -> int:
    """Say what was wrong; of several processes the launcher says it, once."""
    if launch.is_rank():
        launch.report("error", mask(message))
    else:
        print(f"draftpool: error: {mask(message)}", file=sys.stderr)
    return 2


def _stop(signum: int, frame: object) -> None:
    # A cluster ends a job by SIGTERM: unwind as for Ctrl-C, so that no temporary file stays.
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; returns the exit status (2: bad input, 130: interrupted)."""
    signal.signal(signal.SIGTERM, _stop)
    hide_secrets()
    try:
        arguments = _parser().parse_args(argv)
        # What ranks of a shared training are started with.
        arguments.argv = sys.argv[1:] if argv is None else argv
        # What every process writes down of its command.
        sys.argv[:] = mask_command(sys.argv)
        return _run(arguments) or 0
    except DraftpoolError as error:
        return _fail(str(error))
    except PeerLostError as error:
        launch.report("peer", str(error))
        # Time for the launcher to notice the process whose end was the cause, and to end this one.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(2)
        return 1
    except KeyboardInterrupt:
        if not launch.is_rank():
            print("draftpool: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _fail("the disk is full -> free some space and run the same command again")
        raise
    except Exception as error:
        if launch.is_rank():
            launch.report("crash", " ".join(f"{type(error).__name__}: {error}".split()))
        raise


if __name__ == "__main__":
    sys.exit(main())
