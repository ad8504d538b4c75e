"""Details of a run: settings in which it differs from the others, provenance, and fall-backs of its solves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from gramgn.report.run_table import ReportRun, number_text

# Groups whose keys mean something only together with the choice: alpha of GGN is not compared with a run of SGD.
_GROUPS = ("dataset", "model", "optimizer", "trainer")
_COUNTS = {
    "solve_cholesky": "solves by Cholesky (the regular way)",
    "solve_eigh": "solves by eigenvalues, after Cholesky failed",
    "solve_minimum_norm": "minimum-norm solves (alpha = 0 or close to it)",
    "solve_non_finite": "solves with a non-finite result",
    "ill_conditioned": "alpha below the rounding of G",
    "rejected_steps": "steps rejected by adaptive damping or line search",
    "given_up": "steps given up, so that nothing moved",
    "skipped_batches": "batches skipped",
}


def compared_settings(runs: Iterable[ReportRun]) -> pd.DataFrame:
    """Return the settings of all runs next to the usual ones.

    The `conf/` of today need not be the one a run was made with, so a run is compared with the others on the page: for
    each key with the value that most runs with the same choice have; among equally frequent ones with that of the
    first run.

    Returns:
        A row per run and key: `run` (its name), `choice` (e.g. `"optimizer=ggn"`, or `"general"`), `key`, `value` and
        `usual` as texts.
    """
    rows = [
        (run.name, _choice(run, key), key, _text(value))
        for run in runs
        for key, value in run.settings.items()
    ]
    found = pd.DataFrame(rows, columns=["run", "choice", "key", "value"])
    # Of equally frequent values, idxmax returns the first one counted.
    usual = found.groupby(["choice", "key"]).value
    return found.assign(usual=usual.transform(lambda values: values.value_counts(sort=False).idxmax()))


def sections(run: ReportRun) -> dict[str, dict[str, str]]:
    """Return headings with names and values about a run; what is not known is left out."""
    record = run.record
    starts = record.get("starts") or []
    dirty = {"True": "yes: files differed from the commit", "False": "no"}.get(
        str(_at(record, "git", "dirty"))
    )
    counts = _at(record, "dataset", "summary", "counts")
    found: dict[str, dict[str, Any]] = {
        "Given on the command line": {
            "overrides": " ".join(map(str, record.get("overrides") or ())),
            "choices": _pairs(record.get("choices"), "="),
            "name": record.get("name"),
        },
        "Provenance": {
            "run id": record.get("id"),
            "git commit": _at(record, "git", "commit") or run.value("git"),
            "uncommitted changes": dirty or _at(record, "git", "note"),
            "hash of the changes": _at(record, "git", "diff_sha256") or run.value("git_diff"),
            "versions": _pairs(record.get("versions"), " ")
            or (f"torch {run.value('torch')}" if run.value("torch") else None),
            "device": " · ".join(filter(None, (run.value("device"), run.value("device_kind")))),
            "CPU threads": run.value("threads"),
            "kernels": run.value("kernels"),
            "precision": _pairs(record.get("precision"), " "),
            "started (UTC)": ", ".join(str(start.get("time_utc")) for start in starts) or run.value("began"),
            "platform": ", ".join(dict.fromkeys(str(start.get("platform")) for start in starts)),
            "resumed": f"{record['resume_count']} times" if record.get("resume_count") else None,
            "started from": record.get("init_from"),
        },
        "Data": {
            "data set": run.value("dataset"),
            "kind": "SYNTHETIC" if run.value("kind") == "synthetic" else run.value("kind"),
            "image size": run.value("image_size"),
            "images used": run.value("num_images"),
            "in the prepared set": _pairs(counts, " "),
            "manifest (SHA-256)": _at(record, "dataset", "manifest_sha256") or run.value("manifest"),
        },
        "Solves and fall-backs, summed over the epochs": {
            name: int(run.rows[column].sum())
            for column, name in _COUNTS.items()
            if run.rows[column].notna().any()
        },
        "Time (s)": {name: number_text(value) for name, value in (record.get("time") or {}).items()},
    }
    known = {
        title: {name: _text(value) for name, value in pairs.items() if value is not None and value != ""}
        for title, pairs in found.items()
    }
    return {title: pairs for title, pairs in known.items() if pairs}


def _choice(run: ReportRun, key: str) -> str:
    group = key.split(".")[0]
    if group not in _GROUPS:
        return "general"
    column = "scale" if group == "trainer" else group
    return f"{group}={_at(run.record, 'choices', group) or run.value(column) or '?'}"


def _text(value: Any) -> str:
    """Return a string as it is, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _at(record: Mapping[str, Any], *keys: str) -> Any:
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _pairs(found: Any, between: str) -> str | None:
    if not isinstance(found, Mapping):
        return None
    return ", ".join(f"{name}{between}{_text(value)}" for name, value in found.items() if value is not None)
