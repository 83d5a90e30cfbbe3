"""Writing one data frame as CSV, Markdown, LaTeX and HTML."""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

import pandas as pd

from draftpool.artefacts import atomic_path

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}

_NUMBER = re.compile(r"[+-]?\d[\d.,+\-\[\] ]*$")
_STYLE = """
body { background: #fff; color: #111; margin: 1rem; font: 13px/1.4 sans-serif; }
table { border-collapse: collapse; }
th { position: sticky; top: 0; background: #fff; text-align: left; border-bottom: 2px solid #111; }
td { border-bottom: 1px solid #ddd; vertical-align: top; }
th, td { padding: 3px 10px 3px 0; }
td { max-width: 40em; }
.number { white-space: nowrap; }
p { max-width: 60em; color: #444; }
"""


def write_all(frame: pd.DataFrame, out: Path, note: str = "") -> None:
    """Write ``out`` (CSV) and, beside it, ``.md``, ``.tex`` and ``.html``.

    Args:
        frame: Cells as they are to be read: text, or numbers that need no rounding; missing ones show a dash.
        out: Path of the CSV.
        note: What intervals and n mean; a line under the Markdown and HTML tables, a comment above the LaTeX one.
    """
    cells = frame.astype(object).where(frame.notna(), "-").astype(str)
    texts = {
        ".csv": frame.to_csv(index=False),
        ".md": markdown(cells, note),
        ".tex": _latex(cells, note),
        ".html": html_page(cells, note),
    }
    for suffix, text in texts.items():
        with atomic_path(Path(out).with_suffix(suffix)) as temporary:
            temporary.write_text(text, encoding="utf-8")


def interval_text(row: pd.Series | dict, digits: int = 2, signed: bool = False) -> str:
    """``1.42 [1.31, 1.55]``; only the value where there is no interval."""
    sign = "+" if signed else ""
    value = f"{row['value']:{sign}.{digits}f}"
    if not (math.isfinite(row["low"]) and math.isfinite(row["high"])):
        return value
    return f"{value} [{row['low']:{sign}.{digits}f}, {row['high']:{sign}.{digits}f}]"


def escape_latex(text: str) -> str:
    """Escape what LaTeX would read as a command."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def markdown(cells: pd.DataFrame, note: str = "") -> str:
    """A Markdown table of text cells, with a note below it."""

    def line(values: list[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"

    lines = [line(list(cells.columns)), "|" + " --- |" * len(cells.columns)]
    lines += [line(list(row)) for row in cells.itertuples(index=False)]
    return "\n".join(lines + (["", note] if note else [])) + "\n"


def html_page(cells: pd.DataFrame, note: str = "") -> str:
    """An HTML page, which reads nothing else, with a table of text cells and a note below it."""

    def row(values: list[str], tag: str) -> str:
        # Numbers with their intervals stay in one line.
        marks = [' class="number"' if _NUMBER.match(value) else "" for value in values]
        cells = (f"<{tag}{mark}>{escape(v)}</{tag}>" for mark, v in zip(marks, values, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    lines = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><style>{_STYLE}</style></head><body>',
        f"<table><thead>{row(list(cells.columns), 'th')}</thead><tbody>",
        *(row(list(values), "td") for values in cells.itertuples(index=False)),
        "</tbody></table>",
        *([f"<p>{escape(note)}</p>"] if note else []),
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def _latex(cells: pd.DataFrame, note: str) -> str:
    def line(values: list[str]) -> str:
        # Braces: else an opening bracket is taken for the optional argument of the line break before it.
        return " & ".join("{" + escape_latex(value) + "}" for value in values) + r" \\"

    lines = [f"% {note}"] if note else []
    lines += [
        r"\begin{tabular}{" + "l" * len(cells.columns) + "}",
        r"\toprule",
        line(list(cells.columns)),
        r"\midrule",
    ]
    lines += [line(list(row)) for row in cells.itertuples(index=False)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
