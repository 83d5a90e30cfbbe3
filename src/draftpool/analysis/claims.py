"""Verdicts on published claims: each a testable sentence over the statistics of a study (config/claims.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from draftpool.analysis.bootstrap import Interval, Resampling, mean_interval, ratio_of_ratios_interval
from draftpool.analysis.tidy import read_tidy
from draftpool.artefacts import atomic_dir, read_json, write_json, write_provenance
from draftpool.data.streams import HELD_OUT
from draftpool.errors import DraftpoolError
from draftpool.tables.writer import html_page, markdown

# Below this headroom of the best switching sequence no selector can show anything (DESIGN section 9).
NO_HEADROOM = 0.05
VERDICTS = ("reproduced", "contradicted", "inconclusive", "inconclusive: no headroom", "not judged here")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Expected(_Strict):
    """What the claim says about the effect: `above` or `below` a number, or `within` two."""

    above: float | None = None
    below: float | None = None
    within: list[float] | None = Field(None, min_length=2, max_length=2)

    def verdict(self, effect: Interval) -> str:
        """Reproduced if the whole interval is where the claim says, contradicted if none of it is."""
        if effect.low != effect.low or effect.high != effect.high:
            return "inconclusive"
        low = self.above if self.within is None else self.within[0]
        high = self.below if self.within is None else self.within[1]
        low, high = (-float("inf") if low is None else low), (float("inf") if high is None else high)
        if effect.low >= low and effect.high <= high:
            return "reproduced"
        return "contradicted" if effect.high < low or effect.low > high else "inconclusive"


class SelectorTest(_Strict):
    """Selector `a` against selector `b`, query by query: relative difference of a total.

    Of rounds, of modelled seconds, or of the rounds until nine of ten plays are of a best drafter (`converged`); on all
    queries of a stream or on those of one domain.
    """

    kind: Literal["selectors"]
    a: str
    b: str
    stream: str = HELD_OUT
    domain: str | None = None
    measure: Literal["rounds", "seconds", "converged"] = "rounds"

    def effect(self, stats: Path, resampling: Resampling) -> tuple[Interval, str] | None:
        """Total of a over total of b, minus 1; None if one was not replayed."""
        rows = read_tidy(stats, "replay_queries")
        rows = rows[rows["stream"] == self.stream]
        if self.domain is not None:
            rows = rows[rows["domain"] == self.domain]
        wide = rows.pivot(index="prompt_id", columns="selector", values=self.measure)
        if self.a not in wide or self.b not in wide:
            return None
        both = wide[[self.a, self.b]].dropna()
        ones = pd.Series(1.0, index=both.index)
        return (
            ratio_of_ratios_interval(both[self.a], ones, both[self.b], ones, resampling, minus=1.0),
            f"relative difference in {self.measure}",
        )


class RecipeTest(_Strict):
    """Recipe `a` against recipe `b`: difference of tau, prompt by prompt, on the training seeds that both have.

    On all domains that are trained on, or on one domain or prompt set.
    """

    kind: Literal["recipes"]
    a: str
    b: str
    domain: str | None = None

    def effect(self, stats: Path, resampling: Resampling) -> tuple[Interval, str] | None:
        """Mean difference over prompts; None if a recipe was not trained."""
        drafters = read_tidy(stats, "drafters")
        runs = {
            name: drafters[drafters["recipe"] == name].set_index("seed")["drafter"]
            for name in (self.a, self.b)
        }
        seeds = sorted(set(runs[self.a].index) & set(runs[self.b].index))
        if not seeds:
            return None
        taus = read_tidy(stats, "tau_prompts")
        domains = read_json(stats / "meta.json")["domains"] if self.domain is None else [self.domain]
        taus = taus[taus["domain"].isin(domains)]
        if taus.empty:
            return None
        taus = taus.pivot(index="prompt_id", columns="drafter", values="tau")
        # Most prompt sets are scored with the pool alone.
        seeds = [seed for seed in seeds if all(own[seed] in taus for own in runs.values())]
        if not seeds:
            return None
        means = {name: taus[[own[seed] for seed in seeds]].mean(axis=1) for name, own in runs.items()}
        return mean_interval((means[self.a] - means[self.b]).dropna(), resampling), "difference in tau"


class StatisticTest(_Strict):
    """One row of a tidy CSV that already is a statistic, found by the values of its key columns."""

    kind: Literal["statistic"]
    table: str
    where: dict[str, str] = {}

    def effect(self, stats: Path, resampling: Resampling) -> tuple[Interval, str] | None:
        """The row's value and interval; None if there is none.

        Raises:
            DraftpoolError: If several rows fit.
        """
        rows = read_tidy(stats, self.table)
        for column, value in self.where.items():
            if column not in rows:
                raise DraftpoolError(f"no column `{column}`", f"{self.table}.csv", "mend config/claims.yaml")
            rows = rows[rows[column].astype(str) == value]
        if len(rows) > 1:
            raise DraftpoolError(
                f"{len(rows)} rows fit {self.where}",
                f"{self.table}.csv",
                "name more columns in config/claims.yaml",
            )
        if rows.empty:
            return None
        row = rows.iloc[0]
        interval = Interval(row["value"], row["low"], row["high"], int(row["n"]), str(row["method"]))
        return interval, str(row["unit"])


class Claim(_Strict):
    """A published claim as a sentence that can fail."""

    id: str = Field(pattern="^[a-z0-9_]+$")
    paper: str
    statement: str
    test: Annotated[SelectorTest | RecipeTest | StatisticTest, Field(discriminator="kind")]
    expect: Expected
    about: Literal["selection", "training", "other"] = "other"


def read_claims(raw: list[dict[str, Any]], where: str = "config/claims.yaml") -> list[Claim]:
    """Check a list of claims.

    Raises:
        DraftpoolError: Naming the first field at fault, or an id that is there twice.
    """
    try:
        claims = TypeAdapter(list[Claim]).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DraftpoolError(
            f"{place}: {first['msg']}", where, "see src/draftpool/analysis/claims.py"
        ) from None
    ids = [claim.id for claim in claims]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise DraftpoolError(f"claim `{twice[0]}` is there twice", where, "rename one of the two")
    return claims


def judge(claim: Claim, stats: Path, resampling: Resampling) -> dict[str, Any]:
    """Verdict on one claim: id, paper, statement, verdict, effect, low, high, n, unit, headroom."""
    row: dict[str, Any] = {"id": claim.id, "paper": claim.paper, "statement": claim.statement}
    table = getattr(claim.test, "table", None) or {
        "selectors": "replay_queries",
        "recipes": "tau_prompts",
    }.get(claim.test.kind)
    found = claim.test.effect(stats, resampling) if (stats / f"{table}.csv").is_file() else None
    if found is None:
        return (
            row
            | dict.fromkeys(("effect", "low", "high", "n", "unit", "headroom"))
            | {"verdict": "not judged here"}
        )
    effect, unit = found
    headroom = _headroom(stats, claim)
    verdict = claim.expect.verdict(effect)
    if claim.about == "selection" and headroom is not None and headroom < NO_HEADROOM:
        verdict = "inconclusive: no headroom"

    def number(value: float) -> float | None:
        return float(value) if value == value else None

    return row | {
        "verdict": verdict,
        "effect": number(effect.value),
        "low": number(effect.low),
        "high": number(effect.high),
        "n": effect.n,
        "unit": unit,
        "headroom": headroom,
    }


def _headroom(stats: Path, claim: Claim) -> float | None:
    """Headroom of the best switching sequence on the claim's stream, or on the one domain that it is about."""
    stream, domain = getattr(claim.test, "stream", None), getattr(claim.test, "domain", None)
    if isinstance(claim.test, StatisticTest):
        stream = claim.test.where.get("stream")
    if stream is not None and domain is not None:
        rows = read_tidy(stats, "replay_queries")
        own = rows[
            (rows["stream"] == stream) & (rows["domain"] == domain) & (rows["selector"] == "generalist")
        ]
        return None if own.empty else float(own["rounds"].sum() / own["switching_rounds"].sum() - 1.0)
    if stream is None or not (stats / "headroom.csv").is_file():
        return None
    rows = read_tidy(stats, "headroom")
    own = rows[
        (rows["stream"] == stream) & (rows["oracle"] == "best_switching") & (rows["metric"] == "headroom")
    ]
    return None if own.empty else float(own["value"].iloc[0])


def judge_claims(cfg: dict, stats: Path, out: Path) -> None:
    """Write `claims.json` (DESIGN section 9), `claims.md` and `claims.html`.

    Args:
        cfg: `claims` (as in config/claims.yaml) and `bootstrap`.
        stats: Folder written by compute_stats.
        out: Folder to write.

    Raises:
        DraftpoolError: If a claim is malformed.
    """
    resampling = Resampling(**cfg["bootstrap"])
    verdicts = [judge(claim, stats, resampling) for claim in read_claims(cfg["claims"])]
    meta = read_json(stats / "meta.json")
    with atomic_dir(out) as folder:
        write_json(folder / "claims.json", verdicts)
        cells, note = claims_table(verdicts), _note(meta)
        (folder / "claims.md").write_text(markdown(cells, note), encoding="utf-8")
        (folder / "claims.html").write_text(html_page(cells, note), encoding="utf-8")
        write_provenance(folder, cfg)


def claims_table(verdicts: list[dict[str, Any]]) -> pd.DataFrame:
    """Verdicts as they are to be read; claims that this study cannot judge come last."""
    rows = []
    for verdict in sorted(verdicts, key=lambda row: row["verdict"] == "not judged here"):
        effect = "-"
        if verdict["effect"] is not None:
            effect = f"{verdict['effect']:+.3f}"
            if verdict["low"] is not None and verdict["high"] is not None:
                effect += f" [{verdict['low']:+.3f}, {verdict['high']:+.3f}]"
            effect += f" {verdict['unit']}"
        headroom = "-" if verdict["headroom"] is None else f"{100 * verdict['headroom']:.1f} %"
        rows.append(
            {
                "paper": verdict["paper"],
                "claim": verdict["statement"],
                "verdict": verdict["verdict"],
                "effect": effect,
                "n": "-" if verdict["n"] is None else str(verdict["n"]),
                "headroom": headroom,
            }
        )
    return pd.DataFrame(rows)


def _note(meta: dict) -> str:
    share = f"{meta['confidence'] * 100:.0f} %"
    return (
        f"Study `{meta['study']}`. Brackets: {share} bootstrap intervals over prompts. Reproduced: the whole interval "
        "lies where the claim says; contradicted: none of it. Headroom: gain in tau of the best switching sequence "
        f"over the generalist; below {NO_HEADROOM * 100:.0f} % a claim about selection stays open."
    )
