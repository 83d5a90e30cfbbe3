"""Where kinds of drafters live; torch is not imported, so that configurations can ask."""

from __future__ import annotations

from collections.abc import Iterable

from draftpool.registry import find_registered

PACKAGE = "draftpool.drafters"
DECORATOR = "register_drafter"


def modules_of(kinds: Iterable[str]) -> list[str]:
    """Modules of these kinds of drafter: what a digest of code must hold besides what is imported.

    Raises:
        DraftpoolError: If nobody registered a kind.
    """
    return sorted({find_registered(PACKAGE, DECORATOR, kind) for kind in kinds})
