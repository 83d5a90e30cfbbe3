"""One list of exact versions: pip, conda and the container agree with each other and with pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "envs/constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_direct_dependency_is_pinned_within_its_range():
    wanted = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
    found = pins()
    assert {canonicalize_name(requirement.name) for requirement in wanted} == set(found)
    for requirement in wanted:
        version = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_conda_and_container_take_their_versions_from_the_same_list():
    environment = yaml.safe_load((REPOSITORY / "envs/environment.yaml").read_text())
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert pip == ["-r constraints.txt"]
    python = next(item for item in environment["dependencies"] if str(item).startswith("python="))
    recipe = (REPOSITORY / "envs/Containerfile").read_text()
    assert "-c envs/constraints.txt" in recipe
    assert f"FROM python:{python.removeprefix('python=')}-slim" in recipe
    assert (
        f'container: "docker://python:{python.removeprefix("python=")}-slim"'
        in (REPOSITORY / "Snakefile").read_text()
    )
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(
        python.removeprefix("python=")
    )
