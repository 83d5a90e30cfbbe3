"""Copies of the repository with a tiny study (checkout.py)."""

from __future__ import annotations

import pytest
from checkout import Checkout, make_checkout


@pytest.fixture(scope="session")
def new_checkout(tmp_path_factory) -> Checkout:
    return make_checkout(tmp_path_factory.mktemp("checkout") / "new")


@pytest.fixture(scope="session")
def finished_checkout(new_checkout, tmp_path_factory) -> Checkout:
    checkout = new_checkout.copy(tmp_path_factory.mktemp("checkout") / "finished")
    (checkout.root / "printed.txt").write_text(checkout.run())
    return checkout


@pytest.fixture
def finished(finished_checkout, tmp_path) -> Checkout:
    """A finished study, copied to a folder of its own."""
    return finished_checkout.copy(tmp_path / "checkout")
