"""`draftpool <stage> ...`: parses flags and calls one function per stage. Snakemake rules call these."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import signal
import sys
from pathlib import Path

from draftpool.artefacts import clear_leftovers
from draftpool.config.hardware import uses_gpu
from draftpool.errors import DraftpoolError
from draftpool.gpus import claim_gpus
from draftpool.provenance.record import recorded
from draftpool.provenance.secrets import hide_secrets, mask, refuse_logins

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

    def stage(name: str, help_text: str, **flags: str) -> None:
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

    stage("fetch_target", "fetch the target model and convert it to a safetensors folder")
    stage("prepare_prompts", "read one domain's prompts out of pinned archives")
    stage(
        "prepare_set",
        "reword held-out prompts, or join them to sessions",
        prompts="folders",
        model="optional folder",
    )
    stage("generate_responses", "let the target answer the prompts", target="folder", prompts="folder")
    stage(
        "train_drafter",
        "train one drafter",
        target="folder",
        responses="folders",
        init="optional folder",
        state="folder",
    )
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
    return parser


def _run_stage(arguments: argparse.Namespace) -> None:
    flags = dict(vars(arguments))
    command, threads = flags.pop("command"), flags.pop("threads")
    cfg = _cfg(flags.pop("cfg"))
    refuse_logins(cfg)
    module_name, function_name = STAGES[command].split(":")
    if threads is not None and command not in WITHOUT_TORCH:
        import torch

        torch.set_num_threads(max(1, threads))
    for folder in {flags["out"].parent, *([flags["state"].parent] if flags.get("state") else [])}:
        clear_leftovers(folder)
    # Before anything touches CUDA, which reads the visible devices once.
    with claim_gpus(int(uses_gpu(cfg["device"])) if "device" in cfg else 0), recorded(command, cfg, flags):
        getattr(importlib.import_module(module_name), function_name)(cfg, **flags)


def _show(arguments: argparse.Namespace, package: str, function: str) -> None:
    """Draw a figure or write a table."""
    known = getattr(importlib.import_module(f"draftpool.{package}"), package.upper())
    if arguments.name not in known:
        raise DraftpoolError(f"no `{arguments.name}`", "flag --name", f"known: {', '.join(known)}")
    module = importlib.import_module(f"draftpool.{package}.{arguments.name}")
    flags = {"stats": arguments.stats, "out": arguments.out}
    with recorded(arguments.command, {"name": arguments.name}, flags, resolved=False):
        getattr(module, function)(**flags)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.command in STAGES:
        _run_stage(arguments)
    elif arguments.command == "draw_figure":
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
    else:
        from draftpool.config.load import load
        from draftpool.config.plan import Plan
        from draftpool.config.stages import check_kinds

        plan = Plan(load(*arguments.files))
        check_kinds(plan)
        plan.by_stage()
        print("configuration is valid")


def _stop(signum: int, frame: object) -> None:
    # A cluster ends a job by SIGTERM: unwind as for Ctrl-C, so that no temporary file stays.
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; returns the exit status (2: bad input, 130: interrupted)."""
    signal.signal(signal.SIGTERM, _stop)
    hide_secrets()
    try:
        _run(_parser().parse_args(argv))
    except DraftpoolError as error:
        print(f"draftpool: error: {mask(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("draftpool: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno == errno.ENOSPC:
            print(
                "draftpool: error: the disk is full -> free some space and run the same command again",
                file=sys.stderr,
            )
            return 2
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
