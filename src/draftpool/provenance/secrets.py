"""Tokens and passwords are kept out of what is printed and recorded."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from draftpool.errors import DraftpoolError

HIDDEN = "***"
# `max_new_tokens`, `tokenizer` and `eos_token` hold no secret.
_SPECIAL = "".join(f"(?<!{name}_)" for name in ("eos", "bos", "pad", "unk", "sep", "cls", "mask"))
_WORD = rf"(?:{_SPECIAL}token(?![a-z])|secret|passw(?:or)?d|api[_-]?key|access[_-]?key)"
_NAME = re.compile(_WORD, re.IGNORECASE)
_NAMED = re.compile(
    rf"(?P<name>[\w.-]*{_WORD}[\w.-]*)(?P<sign>[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;&}}\])]+)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^/@\s\"']+@", re.IGNORECASE)
_SHORTEST = 6  # a shorter value of the environment is no secret, and would be found in many words


def _of_environment() -> list[str]:
    found = {value for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _SHORTEST}
    return sorted(found, key=len, reverse=True)


def mask(text: str) -> str:
    """Return ``text`` without secrets.

    Hidden are what stands before the ``@`` of an address, values after names such as ``token=``, and the values of
    environment variables with such names.
    """
    for value in _of_environment():
        text = text.replace(value, HIDDEN)
    text = _LOGIN.sub(rf"\g<scheme>{HIDDEN}@", text)
    return _NAMED.sub(rf"\g<name>\g<sign>{HIDDEN}", text)


def mask_command(words: list[str]) -> list[str]:
    """Return a command line without secrets; the word after a flag such as ``--token`` is one."""
    masked, hide = [], False
    for word in words:
        masked.append(HIDDEN if hide else mask(word))
        hide = word.startswith("-") and "=" not in word and _NAME.search(word) is not None
    return masked


class _MaskedRecord(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802 (the name of the standard library)
        return mask(super().getMessage())


def _show_masked(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(mask("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def hide_secrets() -> None:
    """Mask what this process logs, whichever library does it, and the tracebacks of programming errors.

    huggingface_hub, for one, logs the address that it failed to reach, login included.
    """
    logging.setLogRecordFactory(_MaskedRecord)
    sys.excepthook = _show_masked


def refuse_logins(cfg: dict) -> None:
    """Refuse a configuration with an address that holds a login: it would stand in every record.

    Raises:
        DraftpoolError: Naming the key, not the value.
    """
    for key in _logins(cfg):
        raise DraftpoolError(
            "this address holds a login",
            f"config key `{key}`",
            "take it out; tokens belong in the environment, for example HF_TOKEN",
        )


def _logins(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _logins(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _logins(inner, f"{key}.{place}")
    elif isinstance(value, str) and _LOGIN.search(value):
        yield key
