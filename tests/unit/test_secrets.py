"""Tokens and passwords are neither printed nor recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftpool import cli
from draftpool.config.load import load
from draftpool.errors import DraftpoolError

TINY = Path(__file__).resolve().parents[2] / "tests/workflow/config.yaml"

SECRETS = {
    "HF_TOKEN": "hf_topsecrettoken",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7",
    "DRAFTPOOL_PIP_ARGS": "--index-url https://user:pippassword@127.0.0.1:9/simple --retries 0",
    # Nothing listens there.
    "HF_ENDPOINT": "http://user:endpointpassword@127.0.0.1:9",
    "HF_HUB_DOWNLOAD_TIMEOUT": "1",
}
HIDDEN = ["hf_topsecrettoken", "wJalrXUtnFEMI", "AKIAIOSFODNN7", "pippassword", "endpointpassword"]


@pytest.mark.parametrize("source", ["hub", "package"])
def test_a_failing_download_shows_no_secret(source, tmp_path):
    pack = {"package": "pack", "version": "1.0", "filename": "pack.whl", "sha256": "0" * 64}
    cfg = {"source": source, "model_id": "some/model", "revision": None, "path": None, "archive": pack}
    command = [
        sys.executable,
        "-m",
        "draftpool.cli",
        "fetch_target",
        "--cfg",
        json.dumps(cfg | {"member": "m"}),
    ]
    done = subprocess.run(
        [*command, "--out", "out"],
        cwd=tmp_path,
        env=os.environ
        | SECRETS
        | {"HF_HOME": str(tmp_path / "hf"), "DRAFTPOOL_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 2 and "draftpool: error: " in shown
    assert not [secret for secret in HIDDEN if secret in shown]


def test_records_and_tracebacks_show_no_secret(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"q": "what is it?"}\n' * 4)
    source = {"source": "path", "path": "prompts.jsonl", "template": "{q} x", "split": "both", "subset": "s"}
    cfg = {"domain": "maths", "train": 0, "eval": 1, "seed": 0, "sources": [source | {"licence": "MIT"}]}
    cfg |= {"archives": {}, "max_prompt_chars": None, "split_by": None, "near_duplicate_jaccard": 0.8}
    code = (
        "import os, sys; from draftpool import cli\n"
        "sys.argv += ['--note=' + os.environ['HF_TOKEN'], '--token', 'abcdefgh', 'https://u:pw123456@h/x']\n"
        f"status = cli.main(['prepare_prompts', '--cfg', {json.dumps(cfg)!r}, '--out', 'out'])\n"
        "assert status == 0, status\n"
        "raise RuntimeError('failed at https://u:pw123456@h with ' + os.environ['HF_TOKEN'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | SECRETS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    record = (tmp_path / "out/provenance.json").read_text()
    assert "RuntimeError: failed at https://***@h with ***" in done.stderr
    assert json.loads(record)["command"][-4:] == ["--note=***", "--token", "***", "https://***@h/x"]
    for text in (done.stdout, done.stderr, record):
        assert not [secret for secret in (*HIDDEN, "abcdefgh", "pw123456") if secret in text]


def test_a_login_in_the_configuration_is_refused_by_its_key(tmp_path, capsys):
    overlay = {"target": {"path": "https://user:s3cret@host/model"}}
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    with pytest.raises(DraftpoolError, match=r"config key `target\.path`: this address holds a login"):
        load(TINY, tmp_path / "overlay.yaml")
    assert cli.main(["fetch_target", "--cfg", json.dumps(overlay["target"]), "--out", "o"]) == 2
    shown = capsys.readouterr().err
    assert "config key `path`: this address holds a login" in shown and "s3cret" not in shown
