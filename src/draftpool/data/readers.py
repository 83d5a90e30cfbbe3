"""Readers: one small function per oddly shaped record, found by the name that YAML gives in ``reader:``.

A reader takes one record (one JSON line, or one whole YAML document) and yields flat rows whose fields a
template can use. To add one, write a function here, decorate it with ``@reader("name")``, and name it in
YAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from draftpool.errors import DraftpoolError

Reader = Callable[[dict], Iterable[dict]]

READERS: dict[str, Reader] = {}


def reader(name: str) -> Callable[[Reader], Reader]:
    """Register a reader under ``name``.

    Raises:
        DraftpoolError: If the name is taken.
    """

    def register(function: Reader) -> Reader:
        if name in READERS:
            raise DraftpoolError(
                f"reader {name!r} is registered twice", "draftpool.data.readers", "rename one of them"
            )
        READERS[name] = function
        return function

    return register


def get_reader(name: str, where: str) -> Reader:
    """Return a registered reader.

    Raises:
        DraftpoolError: If no reader has this name; ``where`` says which key asked for it.
    """
    if name not in READERS:
        raise DraftpoolError(f"unknown reader {name!r}", where, f"use one of: {', '.join(sorted(READERS))}")
    return READERS[name]


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _without_footnotes(text: str) -> str:
    return _squeeze(re.sub(r"\[(?:\w|note \d+|\w+ needed)\]", "", text))


def _wording(text: str) -> str:
    return re.sub(r"\d+(?:[.,]\d+)*", "#", text)


@reader("last_message")
def last_message(record: dict) -> Iterator[dict]:
    """Chat record ``input`` [{role, content}]: ``question`` is the last message alone.

    ``wording`` is it without its numbers: equal for questions that differ in numbers only.
    """
    question = record["input"][-1]["content"].strip()
    yield record | {"question": question, "wording": _wording(question)}


@reader("multiple_choice")
def multiple_choice(record: dict) -> Iterator[dict]:
    """Last message of a question, options ``a) ...`` by line or ``A. ...`` in line, and ``ideal`` with its letter.

    Yields ``question``, ``options`` (a line each), ``answer`` (text of the right option), ``letter``,
    ``subject`` (of a ``Subject:`` line, if any), ``wording`` (`last_message`); nothing if it has no options.
    """
    text = re.sub(r"(For each question|Respond with only).*", "", record["input"][-1]["content"])
    by_line = "\na) " in text
    question, *parts = re.split(r"\n([a-d])\) " if by_line else r" ([A-D])\. ", text)
    options = {
        letter.upper(): _squeeze(option) for letter, option in zip(parts[::2], parts[1::2], strict=True)
    }
    if not options:
        return
    subject = re.match(r"Subject: (.*)\n", question)
    question = _squeeze(question[subject.end() :] if subject else question)
    letter = record["ideal"][0].upper()
    yield {
        "question": question,
        "options": "\n".join(f"{name}. {option}" for name, option in options.items()),
        "answer": options[letter],
        "letter": letter,
        "subject": subject.group(1) if subject else None,
        "wording": _wording(question),
    }


@reader("first_turn")
def first_turn(record: dict) -> Iterator[dict]:
    """MT-Bench session ``turns`` or ``prompt`` [text]: ``question`` is the first, ``answer`` its reference if any."""
    turns = record["turns"] if "turns" in record else record["prompt"]
    yield record | {"question": turns[0].strip(), "answer": (record.get("reference") or [None])[0]}


@reader("first_user_message")
def first_user_message(record: dict) -> Iterator[dict]:
    """Chat record ``conversations`` or ``messages`` [{from, value}] or [{role, content}]: ``question``, ``answer``.

    These are the first message and the one after it, in the ShareGPT or the OpenAI form; nothing if the user does not
    speak first.
    """
    messages = record["conversations"] if "conversations" in record else record["messages"]
    spoken = [
        (one.get("role") or one["from"], one.get("content") or one.get("value") or "") for one in messages
    ]
    spoken = [(role, text.strip()) for role, text in spoken if role != "system"]
    if spoken and spoken[0][0] in ("user", "human"):
        yield record | {"question": spoken[0][1], "answer": spoken[1][1] if len(spoken) > 1 else None}


@reader("question_context")
def question_context(record: dict) -> Iterator[dict]:
    """Last message of ``Question: ...`` and ``Context: ...``: ``question`` and ``context``."""
    question, context = re.split(r"\n\s*Context:", record["input"][-1]["content"], maxsplit=1)
    yield record | {
        "question": _squeeze(question.removeprefix("Question:")),
        "context": _without_footnotes(context),
    }


@reader("claims")
def claims(record: dict) -> Iterator[dict]:
    """Last message of ``claim: ...`` lines and a ``question: ...`` line.

    Yields ``claims`` (Markdown list), ``each_claim`` [text], ``question``, ``summary``.
    """
    lines = record["input"][-1]["content"].splitlines()
    found = [_squeeze(line.removeprefix("claim:")) for line in lines if line.startswith("claim:")]
    question = next(line for line in lines if line.startswith("question:"))
    yield record | {
        "claims": "\n".join(f"- {claim}" for claim in found),
        "each_claim": found,
        "question": _squeeze(question.removeprefix("question:")),
        "summary": record["ideal"].removeprefix("Summary:").strip(),
    }


@reader("abstract")
def abstract(record: dict) -> Iterator[dict]:
    """Last message that is an abstract: ``abstract`` on one line, without the rule before its results."""
    yield record | {"abstract": _squeeze(record["input"][-1]["content"].replace("\n-----\n", "\n"))}


@reader("contract_sentence")
def contract_sentence(record: dict) -> Iterator[dict]:
    """Last message that is one sentence in tokens: ``sentence`` (joined) and ``opening`` (its first word)."""
    text = _squeeze(record["input"][-1]["content"])
    text = re.sub(r" ([,.;:)])", r"\1", text).replace("( ", "(")
    text = re.sub(r"(?<=\w) ([-/]) (?=\w)", r"\1", text)
    text = re.sub(r" (['’])(?: (s)\b)?", r"\1\2", text)
    yield record | {"sentence": text, "opening": text.split(" ")[0]}


@reader("passage")
def passage(record: dict) -> Iterator[dict]:
    """Record of shuffled sentences, key ``0`` in true order: ``passage`` is that, without footnote marks."""
    yield {"passage": _without_footnotes(record["0"])}


@reader("task_prompt")
def task_prompt(record: dict) -> Iterator[dict]:
    """Instruction ``task_prompt``: ``question`` without the number that a cut-off answer list leaves."""
    yield record | {"question": re.sub(r"\n\s*\d+\s*$", "", record["task_prompt"]).strip()}


@reader("conversations")
def conversations(record: dict) -> Iterator[dict]:
    """YAML document of ``categories`` and ``conversations`` [[question, answer, ...]]: one row each."""
    for turns in record["conversations"]:
        yield {
            "question": _squeeze(str(turns[0])),
            "answer": _squeeze(str(turns[1])) if len(turns) > 1 else None,
            "category": record["categories"][0],
        }


@reader("spider")
def spider(record: dict) -> Iterator[dict]:
    """Spider record: one message with ``Table: t. Columns: c (type), ...`` lines and a ``Question:`` line."""
    text = record["input"][-1]["content"]
    tables = re.findall(r"^Table: (\w+)\. Columns: (.*)$", text, re.MULTILINE)
    columns = {name: re.sub(r" \(\w+\)(?=,|$)", "", listed) for name, listed in tables}
    question = re.search(r"^Question: (.*)$", text, re.MULTILINE).group(1)
    yield _sql_row(columns, [], question, record["ideal"])


@reader("cosql")
def cosql(record: dict) -> Iterator[dict]:
    """CoSQL record: ``Table t, columns = [*,c,...]`` lines, then ``Q: ...`` and ``A: ...`` by turns."""
    first, *turns = [message["content"].strip() for message in record["input"]]
    tables = re.findall(r"^Table (\w+), columns = \[\*,(.*)\]$", first, re.MULTILINE)
    columns = {name: listed.replace(",", ", ") for name, listed in tables}
    *history, question = turns
    yield _sql_row(columns, history, question.removeprefix("Q:"), record["ideal"][0].removeprefix("A:"))


def _sql_row(columns: dict[str, str], history: list[str], question: str, ideal: str) -> dict:
    # Spider and CoSQL share their databases, so `database` must not depend on which of the two a row is from.
    earlier = "".join(f"{_squeeze(turn)}\n" for turn in history)
    return {
        "schema": "\n".join(f"{name}({listed})" for name, listed in columns.items()),
        "history": f"Earlier:\n{earlier}\n" if earlier else "",
        "question": _squeeze(question),
        "database": " ".join(sorted(name.lower() for name in columns)),
        "query": _squeeze(ideal),
    }
