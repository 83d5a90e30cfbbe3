"""One list of exact versions: pip, conda and the container agree with each other and with pyproject.toml."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from draftpool import cli
from draftpool.artefacts import read_json

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
CONTAINERFILE = (REPOSITORY / "envs/Containerfile").read_text()
# Where the name of a package differs from that of its module.
MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn"}


def requirements() -> list[Requirement]:
    """What pyproject.toml asks for, its own extras left out."""
    texts = [*PROJECT["project"]["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    found = [Requirement(text) for text in texts]
    return [requirement for requirement in found if requirement.name != PROJECT["project"]["name"]]


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "envs/constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "every line pins one exact version"
    names = Counter(canonicalize_name(name) for name, _ in pairs)
    assert set(names.values()) == {1}, f"pinned twice: {names.most_common(1)[0][0]}"
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_direct_dependency_and_extra_is_pinned_once_within_its_range():
    found = pins()
    assert {canonicalize_name(requirement.name) for requirement in requirements()} == set(found)
    for requirement in requirements():
        version = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_what_tests_need_is_in_dev():
    own = [Requirement(text) for text in EXTRAS["dev"]]
    (draftpool,) = [requirement for requirement in own if requirement.name == "draftpool"]
    assert draftpool.extras == {"cluster", "storage"} and draftpool.extras < set(EXTRAS)


def test_installed_versions_are_the_pinned_ones():
    differing = []
    for name, pinned in pins().items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
        # torch 2.13.0+cpu is torch 2.13.0.
        if Version(installed).public != Version(pinned).public:
            differing.append(f"{name} {installed} instead of {pinned}")
    if differing:
        # Allowed: `make setup CONSTRAINTS=`. The numbers in docs/ were measured with the pinned ones.
        pytest.skip(f"other versions than pinned: {', '.join(differing)}")


def test_every_imported_package_is_a_dependency():
    declared = {requirement.name for requirement in map(Requirement, PROJECT["project"]["dependencies"])}
    known = {
        MODULES.get(canonicalize_name(name), canonicalize_name(name)).replace("-", "_") for name in declared
    }
    imported = set()
    for path in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) - {"draftpool"} <= known


def python_of_conda() -> str:
    environment = yaml.safe_load((REPOSITORY / "envs/environment.yaml").read_text())
    (python,) = [item for item in environment["dependencies"] if str(item).startswith("python=")]
    return python.removeprefix("python=")


def test_conda_takes_python_and_pip_and_leaves_the_rest_to_the_one_list():
    environment = yaml.safe_load((REPOSITORY / "envs/environment.yaml").read_text())
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert pip == ["-r constraints.txt"]
    rest = [item for item in environment["dependencies"] if not isinstance(item, dict)]
    assert rest == [f"python={python_of_conda()}", "pip"]


def test_one_version_of_python_that_the_project_allows():
    python = python_of_conda()
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python)
    bases = re.findall(r"^FROM (\S+)", CONTAINERFILE, flags=re.MULTILINE)
    assert bases == [f"python:{python}-slim"]
    assert f'container: "docker://python:{python}-slim"' in (REPOSITORY / "Snakefile").read_text()
    assert "-c envs/constraints.txt" in CONTAINERFILE


def copied() -> dict[str, str]:
    """What the container's recipe copies, and where to."""
    found = {}
    for line in re.findall(r"^COPY (.+)$", CONTAINERFILE, flags=re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            found[source] = f"{target}{source}" if target.endswith("/") else target
    return found


def test_the_container_holds_what_pip_and_snakemake_read(tmp_path):
    for source, target in copied().items():
        path, place = REPOSITORY / source, tmp_path / target
        if path.is_dir():
            shutil.copytree(path, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, place)
    for link, name in re.findall(r"^RUN ln -s (\S+) (\S+)$", CONTAINERFILE, flags=re.MULTILINE):
        (tmp_path / name).symlink_to(link)
    # What setuptools reads.
    named = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "envs/constraints.txt"]
    named += PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]
    assert all((tmp_path / name).exists() for name in named)
    # What Snakemake reads, the default profile included.
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", "-n"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Using workflow specific profile" in done.stderr and "compute_stats" in done.stdout + done.stderr


@pytest.mark.parametrize(("told", "dirty"), [("0123abc", False), ("0123abc-dirty", True)])
def test_results_of_a_container_name_their_commit(told, dirty, tmp_path, monkeypatch):
    assert 'COMMIT="$(git describe --always --dirty --abbrev=40)"' in CONTAINERFILE
    assert "ENV DRAFTPOOL_COMMIT=${COMMIT}" in CONTAINERFILE
    (tmp_path / "rows.jsonl").write_text('{"q": "what is it?"}\n' * 4)
    source = {"source": "path", "path": "rows.jsonl", "template": "{q} x", "split": "both", "subset": "s"}
    cfg = {"domain": "maths", "train": 0, "eval": 1, "seed": 0, "sources": [source | {"licence": "MIT"}]}
    cfg |= {"archives": {}, "max_prompt_chars": None, "split_by": None, "near_duplicate_jaccard": 0.8}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTPOOL_COMMIT", told)
    (tmp_path / "cfg.yaml").write_text(yaml.safe_dump(cfg))
    for hidden in (False, True):
        if hidden:
            monkeypatch.setattr("draftpool.artefacts._git", lambda *_: None)
        assert cli.main(["prepare_prompts", "--cfg", "@cfg.yaml", "--out", f"out{hidden}"]) == 0
    with_git, without = (read_json(tmp_path / f"out{hidden}/provenance.json") for hidden in (False, True))
    assert (without["git_commit"], without["git_dirty"]) == ("0123abc", dirty)
    if shutil.which("git") and (REPOSITORY / ".git").exists():
        assert len(with_git["git_commit"]) == 40
