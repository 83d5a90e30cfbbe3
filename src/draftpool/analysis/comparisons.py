"""tau of drafters and recipes per domain, and paired comparisons between them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from draftpool.analysis.bootstrap import (
    Interval,
    Resampling,
    difference_over_strata,
    holm,
    mean_interval,
    mean_of_ratios_over_strata,
    ratio_interval,
    wilcoxon_p,
)
from draftpool.errors import DraftpoolError

TAU = "tokens/target call"
MEAN = "mean"


def drafter_table(drafters: list[dict]) -> pd.DataFrame:
    """Flatten the drafters of a configuration.

    Returns:
        Columns drafter, kind, recipe, seed, role, home, objective, alpha, reduction, block_size, n_layers, steps,
        group, clip (infinite: none); what was not trained has no objective, steps and clip.
    """
    rows = [
        {
            "drafter": drafter["name"],
            "kind": drafter["kind"],
            **{
                key: drafter[key]
                for key in ("recipe", "seed", "role", "home", "block_size", "n_layers", "steps", "group")
            },
            "objective": objective.get("kind", ""),
            "alpha": objective.get("alpha"),
            "reduction": objective.get("reduction", ""),
            "clip": math.inf if drafter["clip"] is None else float(drafter["clip"]),
        }
        for drafter in drafters
        for objective in [drafter["objective"] or {}]
    ]
    return pd.DataFrame(rows).astype({"alpha": float, "home": object})


def by_recipe(prompts: pd.DataFrame, drafters: pd.DataFrame) -> pd.DataFrame:
    """Average training seeds within a prompt.

    Returns:
        Columns drafter (the recipe's name), prompt_id, domain, tokens, rounds; only prompts that every seed
        was scored on.
    """
    merged = prompts.merge(drafters[["drafter", "recipe"]], on="drafter")
    grouped = merged.groupby(["recipe", "prompt_id", "domain"], observed=True)
    means = grouped.agg(
        tokens=("tokens", "mean"), rounds=("rounds", "mean"), seeds=("drafter", "size")
    ).reset_index()
    wanted = merged.groupby("recipe", observed=True)["drafter"].nunique()
    means = means[means["seeds"] == means["recipe"].map(wanted)]
    return means.drop(columns="seeds").rename(columns={"recipe": "drafter"})


def tau_statistics(
    prompts: pd.DataFrame, domains: list[str], level: str, resampling: Resampling
) -> pd.DataFrame:
    """tau per drafter, domain and mean over domains.

    Args:
        prompts: Columns drafter, prompt_id, domain, tokens, rounds.
        domains: Domains, in the order of the study.
        level: ``run`` or ``recipe``, copied to the table.
        resampling: Bootstrap options; prompts are resampled within each domain.

    Returns:
        Columns level, drafter, scope (a domain or ``mean``), metric (tau: ratio of totals in a domain, mean
        over domains; tau_macro: mean over prompts of tau, mean over domains), value, low, high, n (prompts),
        unit, method.
    """
    rows = []
    for drafter, group in prompts.groupby("drafter", observed=True, sort=False):
        tokens, rounds = _per_domain(group, domains, "tokens"), _per_domain(group, domains, "rounds")
        ones = {name: np.ones_like(values) for name, values in tokens.items()}
        own = {name: tokens[name] / rounds[name] for name in tokens}
        for scope in (*tokens, MEAN):
            used = list(tokens) if scope == MEAN else [scope]
            for metric, above, below in (("tau", tokens, rounds), ("tau_macro", own, ones)):
                found = mean_of_ratios_over_strata(
                    [above[name] for name in used], [below[name] for name in used], resampling
                )
                rows.append(
                    {"level": level, "drafter": drafter, "scope": scope, "metric": metric, **found.row(TAU)}
                )
    return pd.DataFrame(rows)


def seed_spread(taus: pd.DataFrame, drafters: pd.DataFrame) -> pd.DataFrame:
    """Spread over training seeds of the run-level tau: columns recipe, scope, seeds, mean, sd, min, max."""
    runs = taus[(taus["level"] == "run") & (taus["metric"] == "tau")].merge(
        drafters[["drafter", "recipe"]], on="drafter"
    )
    grouped = runs.groupby(["recipe", "scope"], observed=True, sort=False)["value"]
    return grouped.agg(seeds="size", mean="mean", sd="std", min="min", max="max").reset_index()


def compare(
    prompts: pd.DataFrame, pairs: list[dict], domains: list[str], resampling: Resampling
) -> pd.DataFrame:
    """Paired comparisons of recipes.

    Args:
        prompts: Recipe-level rows of ``by_recipe``.
        pairs: ``{"a": recipe, "b": recipe}``.
        domains: Domains, in order.
        resampling: Bootstrap options.

    Returns:
        Columns a, b, scope (a domain or ``mean``), value (tau of a - tau of b), low, high, n, unit, method,
        relative (value / tau of b), p (Wilcoxon signed-rank on the prompts' own taus), p_holm (over pairs for
        ``mean``, over pairs x domains otherwise).

    Raises:
        DraftpoolError: If a recipe was not scored, or the two share no prompt.
    """
    rows = []
    for pair in pairs:
        both = _paired(prompts, pair["a"], pair["b"])
        present = [domain for domain in domains if (both["domain"] == domain).any()]
        for scope in (*present, MEAN):
            used = present if scope == MEAN else [scope]
            rows.append(
                {"a": pair["a"], "b": pair["b"], "scope": scope, **_difference(both, used, resampling)}
            )
    return _with_holm(pd.DataFrame(rows), "scope")


def specialists(
    prompts: pd.DataFrame, drafters: pd.DataFrame, generalist: str, domains: list[str], resampling: Resampling
) -> pd.DataFrame:
    """Specialists at home and abroad against the generalist, prompts paired.

    Args:
        prompts: Run-level rows: drafter, prompt_id, domain, tokens, rounds.
        drafters: See ``drafter_table``.
        generalist: Name of the generalist's run.
        domains: Domains, in order.
        resampling: Bootstrap options.

    Returns:
        Columns drafter, home, scope (home: its own domain; abroad: mean over the others), tau,
        generalist_tau, value (difference), low, high, n, unit, method, relative, p, p_holm (over specialists
        within a scope).
    """
    rows = []
    # Specialists of another kind have a generalist of their own, whom their pool compares them with.
    kind = drafters.loc[drafters["drafter"] == generalist, "kind"].iloc[0]
    chosen = (drafters["role"] == "specialist") & drafters["home"].notna() & (drafters["kind"] == kind)
    for specialist in drafters[chosen].itertuples():
        both = _paired(prompts, specialist.drafter, generalist)
        present = [domain for domain in domains if (both["domain"] == domain).any()]
        for scope, used in (
            ("home", [domain for domain in present if domain == specialist.home]),
            ("abroad", [domain for domain in present if domain != specialist.home]),
        ):
            if used:
                head = {"drafter": specialist.drafter, "home": specialist.home, "scope": scope}
                found = _difference(both, used, resampling)
                head["tau"], head["generalist_tau"] = (
                    _mean_tau(both, used, "rounds_a"),
                    _mean_tau(both, used, "rounds_b"),
                )
                rows.append(head | found)
    return _with_holm(pd.DataFrame(rows), "scope")


def domain_statistics(
    responses: pd.DataFrame,
    prompts: pd.DataFrame,
    generalist: str,
    domains: list[str],
    resampling: Resampling,
) -> pd.DataFrame:
    """Repetition of the target's answers beside the generalist's tau: loops are easy to draft.

    Args:
        responses: Columns prompt_id, domain, repetition, finish, n_tokens of the scored answers.
        prompts: Run-level rows.
        generalist: Name of the generalist's run; may be empty.
        domains: Domains, in order.
        resampling: Bootstrap options.

    Returns:
        Columns domain, metric (repetition, tau, tokens, ends_by_limit), value, low, high, n (prompts), unit,
        method.
    """
    responses = responses[responses["prompt_id"].isin(set(prompts["prompt_id"]))]
    numbers = responses.assign(limit=(responses["finish"] == "limit").astype(float))
    means = (
        numbers.groupby(["prompt_id", "domain"], observed=True)[["repetition", "limit", "n_tokens"]]
        .mean()
        .reset_index()
    )
    own = prompts[prompts["drafter"] == generalist]
    rows = []
    for domain in domains:
        group, drafted = means[means["domain"] == domain], own[own["domain"] == domain]
        found: list[tuple[str, Interval, str]] = []
        if len(group):
            found += [
                ("repetition", mean_interval(group["repetition"], resampling), "share of repeated 4-grams"),
                ("tokens", mean_interval(group["n_tokens"], resampling), "tokens/answer"),
                ("ends_by_limit", mean_interval(group["limit"], resampling), "share of answers"),
            ]
        if len(drafted):
            found.append(("tau", ratio_interval(drafted["tokens"], drafted["rounds"], resampling), TAU))
        rows += [
            {"domain": domain, "metric": metric, **interval.row(unit)} for metric, interval, unit in found
        ]
    return pd.DataFrame(rows)


def _per_domain(group: pd.DataFrame, domains: list[str], column: str) -> dict[str, np.ndarray]:
    split = {domain: group.loc[group["domain"] == domain, column].to_numpy(dtype=float) for domain in domains}
    return {domain: values for domain, values in split.items() if len(values)}


def _paired(prompts: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    sides = {}
    for name in (a, b):
        sides[name] = prompts[prompts["drafter"] == name]
        if sides[name].empty:
            raise DraftpoolError(
                "not in the acceptance table", f"drafter {name}", "score it, or take it out of `compare`"
            )
    both = sides[a].merge(sides[b][["prompt_id", "tokens", "rounds"]], on="prompt_id", suffixes=("_a", "_b"))
    if both.empty or (both["tokens_a"] != both["tokens_b"]).any():
        raise DraftpoolError(
            "scored on different answers, so they cannot be paired",
            f"drafters {a}, {b}",
            "score the pool again",
        )
    return both


def _mean_tau(both: pd.DataFrame, domains: list[str], column: str) -> float:
    sums = both[both["domain"].isin(domains)].groupby("domain", observed=True)[["tokens_a", column]].sum()
    return float((sums["tokens_a"] / sums[column]).mean())


def _difference(both: pd.DataFrame, domains: list[str], resampling: Resampling) -> dict[str, object]:
    tokens, a, b = (
        _per_domain(both, domains, column).values() for column in ("tokens_a", "rounds_a", "rounds_b")
    )
    found = difference_over_strata(list(tokens), list(a), list(b), resampling)
    used = both[both["domain"].isin(domains)]
    p = wilcoxon_p(used["tokens_a"] / used["rounds_a"] - used["tokens_a"] / used["rounds_b"])
    return {**found.row(TAU), "relative": found.value / _mean_tau(both, domains, "rounds_b"), "p": p}


def _with_holm(frame: pd.DataFrame, scope: str) -> pd.DataFrame:
    if frame.empty:
        return frame
    # Two families: the headline scopes each by themselves, all single domains together.
    family = frame[scope].where(frame[scope].isin([MEAN, "home", "abroad"]), "domain")
    return frame.assign(p_holm=frame.groupby(family)["p"].transform(holm))
