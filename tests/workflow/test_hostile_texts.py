"""What stands in a configuration is data to the shells of the rules, and what is secret stays out of their logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

EVIL = [
    '"; touch pwned; "',
    "'; touch pwned; '",
    "$(touch pwned)",
    "`touch pwned`",
    "a\ntouch pwned\n",
    "a && touch pwned & touch pwned | touch pwned > pwned",
    "{input} {params.cfg} {wildcards.id} {{x}} %s \\",
    "-rf ~ $HOME * ? [a] !! #",
    "\u202e\u2028 naïve \x1b[31m",
]


def changed(checkout) -> dict:
    """Put every evil text wherever the configuration takes free text."""
    config = checkout.read_config()
    (source,) = config["domains"]["maths"]["sources"]
    sources = [
        source
        | {"subset": text, "licence": text, "reference": text, "member": text, "group": text}
        | {"template": f"{text.replace('{', '{{').replace('}', '}}')} {{question}}", "where": {text: [text]}}
        for text in EVIL
    ]
    return {
        "domains": {"maths": {"sources": sources}},
        "target": {"path": f"models/{EVIL[2]} {EVIL[0]}"},
        "drafters": {"general": {"group": EVIL[3]}},
        "sweeps": {"depth": {"group": EVIL[2]}},
        "selectors": {"ucb": {"reward": "be", "kind": "metasd_ucb"}},
    }


def test_shells_run_nothing_that_stands_in_the_configuration(new_checkout, tmp_path):
    checkout = new_checkout.copy(tmp_path / "it's a $(touch pwned) checkout")
    overlay = checkout.overlay(changed(checkout))
    checkout.run(*overlay)
    assert not list(tmp_path.rglob("pwned"))
    (prompts,) = checkout.root.glob("results/prompts/maths-*")
    sources = json.loads((prompts / "cfg.json").read_text())["sources"]
    # What the job was given is what stood in the file, letter for letter.
    assert [source["licence"] for source in sources] == EVIL
    assert [list(source["where"]) for source in sources] == [[text] for text in EVIL]
    (target,) = checkout.root.glob("results/targets/*")
    assert json.loads((target / "cfg.json").read_text())["path"] == f"models/{EVIL[2]} {EVIL[0]}"
    assert {path.name for path in (checkout.root / "results").iterdir() if path.is_dir()} <= {
        *("targets", "prompts", "responses", "drafters", "lossless", "scores", "decodes", "costs", "replays"),
        *("tiny", "logs", "benchmarks", "state", "routes", "profiles"),
    }


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a; touch pwned", "$(touch pwned)"])
def test_a_study_of_such_a_name_is_one_line(new_checkout, tmp_path, name):
    checkout = new_checkout.copy(tmp_path / "checkout")
    done = checkout.snakemake("--cores", "1", *checkout.overlay({"experiment": name}))
    shown = [line for line in (done.stdout + done.stderr).splitlines() if "draftpool: error" in line]
    assert done.returncode == 1 and len(shown) == 1 and "config key `experiment`" in shown[0]
    assert not list(tmp_path.rglob("pwned")) and not (checkout.root / "results").exists()


def test_yaml_that_would_call_something_ends_the_run(new_checkout, tmp_path):
    checkout = new_checkout.copy(tmp_path / "checkout")
    (checkout.root / "bad.yaml").write_text("experiment: !!python/object/apply:os.system ['touch pwned']\n")
    done = checkout.snakemake("--cores", "1", "--configfile", "bad.yaml")
    assert done.returncode == 1 and not list(tmp_path.rglob("pwned"))
    assert "Config file is not valid JSON or YAML" in done.stdout + done.stderr


def test_a_failing_job_shows_no_secret_in_its_log(new_checkout, tmp_path):
    checkout = new_checkout.copy(tmp_path / "checkout")
    secrets = {
        "HF_TOKEN": "hf_topsecrettoken",
        "HF_ENDPOINT": "http://user:endpointpassword@127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    }
    hub = {"target": {"name": "far", "source": "hub", "model_id": "some/model", "path": None}}
    overlay = checkout.overlay(hub)
    done = checkout.snakemake("--cores", "1", "--until", "fetch_target", *overlay, pretend=False, **secrets)
    assert done.returncode == 1
    (log,) = checkout.root.glob("results/logs/fetch_target/far-*.log")
    assert "draftpool: error: config key `target.model_id`" in log.read_text()
    kept = [
        path.read_bytes() for path in checkout.root.rglob("*") if path.is_file() and inside(path, checkout)
    ]
    for secret in ("hf_topsecrettoken", "endpointpassword", "wJalrXUtnFEMI"):
        assert secret not in done.stdout + done.stderr
        assert not any(secret.encode() in content for content in kept)


def inside(path: Path, checkout) -> bool:
    return path.relative_to(checkout.root).parts[0] in ("results", ".snakemake")


def test_a_login_in_the_configuration_ends_before_any_job(new_checkout, tmp_path):
    checkout = new_checkout.copy(tmp_path / "checkout")
    address = "https://user:s3cret@host/model"
    (checkout.root / "overlay.yaml").write_text(yaml.safe_dump({"target": {"path": address}}))
    done = checkout.snakemake("--cores", "1", "--configfile", "overlay.yaml")
    assert done.returncode == 1 and "config key `target.path`: this address holds a login" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr
