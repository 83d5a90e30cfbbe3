"""Registered classes are found in the sources, without importing anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftpool import registry
from draftpool.errors import DraftpoolError
from draftpool.registry import find_registered, list_registered, load_registered


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `zoo_for_tests.cages` whose modules must not be imported by a scan."""
    folder = tmp_path / "zoo_for_tests" / "cages"
    folder.mkdir(parents=True)
    for place in (folder.parent, folder):
        (place / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "birds.py").write_text(
        "import base\n@base.register_animal('owl')\nclass Owl:\n    pass\n"
        "# register_animal('ghost')\n@register_animal('wren')\nclass Wren:\n    pass\n"
    )
    (folder / "fish.py").write_text("@other('x')\n@register_animal('carp')\nclass Carp:\n    pass\n")
    (folder / "notes.py").write_text("this is not python\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_scan_lists_names_and_modules_without_importing(package):
    assert list_registered("zoo_for_tests.cages", "register_animal") == {
        "carp": "zoo_for_tests.cages.fish",
        "owl": "zoo_for_tests.cages.birds",
        "wren": "zoo_for_tests.cages.birds",
    }
    assert find_registered("zoo_for_tests.cages", "register_animal", "carp") == "zoo_for_tests.cages.fish"
    assert not [name for name in sys.modules if name.startswith("zoo_for_tests")]


def test_unknown_name_lists_what_exists(package):
    with pytest.raises(DraftpoolError, match=r"unknown animal 'cat'.*use one of: carp, owl, wren"):
        find_registered("zoo_for_tests.cages", "register_animal", "cat")


def test_a_new_file_is_all_it_takes(package):
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    (package / "cats.py").write_text(
        "def register_animal(name):\n    return lambda cls: cls\n"
        "@register_animal('cat')\nclass Cat:\n    legs = 4\n"
    )
    assert load_registered("zoo_for_tests.cages", "register_animal", "cat").legs == 4
    for name in [name for name in sys.modules if name.startswith("zoo_for_tests")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@register_animal('carp')\nclass Twin:\n    pass\n", "registered twice.*rename"),
        ("NAME = 'x'\n@register_animal(NAME)\nclass Odd:\n    pass\n", "needs one literal string"),
        (
            "@register_animal('y'\nclass Broken:\n    pass\n",
            r"zoo_for_tests/cages/zz\.py, line \d+: cannot parse",
        ),
    ],
)
def test_mistakes_in_sources_name_the_file(package, source, message):
    (package / "zz.py").write_text(source)
    with pytest.raises(DraftpoolError, match=message) as caught:
        list_registered("zoo_for_tests.cages", "register_animal")
    assert "zoo_for_tests/cages/zz.py" in str(caught.value)
    assert str(package) not in str(caught.value)


def test_unknown_package():
    with pytest.raises(DraftpoolError, match="no package 'draftpool.nothing'"):
        list_registered("draftpool.nothing", "register_selector")


def test_shipped_kinds_are_found_without_heavy_imports():
    selectors = list_registered("draftpool.selectors", "register_selector")
    assert {"fixed", "plain", "random", "round_robin", "metasd_ucb", "exp3", "hedgespec"} <= set(selectors)
    objectives = list_registered("draftpool.training.objectives", "register_objective")
    assert {
        "dflash",
        "uniform",
        "head_dependent",
        "dpace",
        "dpace_cumulative",
        "dpace_continuation",
        "direct_surrogate",
    } <= set(objectives)
    code = (
        "import sys; from draftpool.selectors.base import make_selector; "
        "from draftpool.training.objectives.base import make_objective; "
        "make_selector({'kind': 'metasd_ucb'}, ['a']); make_objective({'kind': 'dpace'}, 16); "
        "assert 'torch' not in sys.modules"
    )
    source = registry.__file__.rsplit("/draftpool/", 1)[0]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})
