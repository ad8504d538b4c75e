"""From runs, figures and claims to one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ._claims import ClaimGroup
from ._details import details
from ._entries import Entry
from ._overview import Problem, code_warning, run_sets, synthetic_warning
from ._pictures import PictureSet
from ._settings import UsualSettings
from ._table import NOTHING, columns


def render(
    entries: list[Entry],
    problems: list[Problem],
    claims: list[ClaimGroup],
    pictures: list[PictureSet],
    left_out: list[str],
    source: str,
) -> bytes:
    """Return the page. The same content gives the same bytes.

    Every text out of a record, a file or a folder's name is escaped. Beyond that the page forbids itself, by its
    content security policy, any request and any script or style but its own.

    Args:
        entries: All runs, ordered by path.
        problems: The runs that did not end well.
        claims: Groups of claims with what was measured.
        pictures: The figures.
        left_out: One line for each run that figures and claims do not use.
        source: What the page was made from, in words.
    """
    style, script = _own_file("style.css"), _own_file("script.js")
    usual = UsualSettings(entries)
    table = columns()
    page = _templates().get_template("page.html.j2")
    text = page.render(
        policy=_policy(style, script),
        # Our own files, not data: the only two texts that are not escaped.
        style=Markup(style),
        script=Markup(script),
        entries=entries,
        synthetic=synthetic_warning(entries),
        code=code_warning(entries),
        source=source,
        sets=run_sets(entries),
        problems=problems,
        claims=claims,
        pictures=pictures,
        left_out=left_out,
        columns=table,
        nothing=NOTHING,
        rows=[(entry, [column.cell(entry) for column in table]) for entry in entries],
        usual=usual.groups(),
        details=[details(entry, usual) for entry in entries],
    )
    # A folder's name need not be text, and JSON can hold half a surrogate pair: neither may spoil the page.
    return text.encode("utf-8", errors="replace")


def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("gramgn.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _own_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    return (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
