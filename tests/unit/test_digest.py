"""Code digests follow imports inside the package, and see code only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from draftpool.cli import STAGES
from draftpool.config import digest
from draftpool.config.stages import stage_code
from draftpool.errors import DraftpoolError

PACKAGE = Path(digest.__file__).resolve().parents[1]

STAGE = (
    '"""A stage."""\n\nfrom draftpool.helpers import work\nfrom draftpool.parts import first\n\nX = work(1)\n'
)
SOURCES = {
    "stage.py": STAGE,
    "helpers.py": "def work(x):\n    return x + 1\n",
    "parts/__init__.py": '"""Parts."""\n\nNAMES = ["first", "second"]\n',
    "parts/first.py": "VALUE = 1\n",
    "parts/second.py": "VALUE = 2\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "ROOT", tmp_path)
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    digest._read.cache_clear()
    yield tmp_path
    digest._read.cache_clear()


def digest_after(package: Path, name: str, text: str) -> str:
    (package / name).write_text(text)
    digest._read.cache_clear()
    return digest.code_digest("draftpool.stage")


def test_modules_are_followed_but_not_the_package_beside_a_module(package):
    assert digest.modules_of("draftpool.stage") == [
        "draftpool.helpers",
        "draftpool.parts.first",
        "draftpool.stage",
    ]
    (package / "stage.py").write_text("from draftpool.parts import NAMES\n")
    digest._read.cache_clear()
    assert digest.modules_of("draftpool.stage") == ["draftpool.parts", "draftpool.stage"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stage.py", "# A comment.\n" + STAGE),
        ("stage.py", STAGE.replace("A stage.", "Another description.")),
        ("helpers.py", 'def work(x):\n    """Add one."""\n    # why\n    return (x\n            + 1)\n'),
        ("parts/second.py", "VALUE = 3\n"),
        ("parts/__init__.py", 'NAMES = ["first", "second", "third"]\n'),
    ],
)
def test_d42_words_layout_and_unused_modules_do_not_count(package, name, text):
    before = digest.code_digest("draftpool.stage")
    assert digest_after(package, name, text) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stage.py", STAGE.replace("work(1)", "work(2)")),
        ("helpers.py", "def work(x):\n    return x + 2\n"),
        ("parts/first.py", "VALUE = '1'\n"),
    ],
)
def test_d42_one_line_of_logic_counts(package, name, text):
    before = digest.code_digest("draftpool.stage")
    assert digest_after(package, name, text) != before


def test_circular_imports_end(package):
    assert digest_after(package, "helpers.py", "from draftpool import stage\n\ndef work(x):\n    return x\n")


def test_an_unknown_module_is_an_error_not_an_empty_digest(package):
    with pytest.raises(DraftpoolError, match=r"no module draftpool\.stagee"):
        digest.code_digest("draftpool.stagee")


def test_a_registered_kind_adds_its_own_module():
    other = {"objective": {"kind": "dflash"}}
    assert stage_code("train_drafter", {"objective": {"kind": "dpace"}}) != stage_code("train_drafter", other)
    one = {"selectors": {"random": {"kind": "random"}}}
    two = {"selectors": {"random": {"kind": "random"}, "exp3": {"kind": "exp3"}}}
    assert stage_code("decode_live", one) != stage_code("decode_live", two)
    renamed = {"selectors": {"chance": {"kind": "random"}}}
    assert stage_code("decode_live", one) == stage_code("decode_live", renamed)
    with pytest.raises(DraftpoolError, match="unknown objective 'dpacee'"):
        stage_code("train_drafter", {"objective": {"kind": "dpacee"}})


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_depends_on_the_models_of_the_configuration(stage):
    # Otherwise a new option of one stage would rerun all of them.
    modules = digest.modules_of(STAGES[stage].split(":")[0])
    assert not {"draftpool.config.models", "draftpool.config.plan", "draftpool.cli"} & set(modules)


def test_packages_hold_no_code_that_digests_would_miss():
    for path in PACKAGE.rglob("__init__.py"):
        statements = [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.Assign)]
        assert all(
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in statements
        ), path
