"""The finished smoke study, made once for all files of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from smoke_study import run


@pytest.fixture(scope="session")
def study(tmp_path_factory) -> Path:
    """The folder in which the smoke study has run; tests add to it and change nothing."""
    folder = tmp_path_factory.mktemp("smoke")
    run(folder, "--cores", "2")
    return folder
