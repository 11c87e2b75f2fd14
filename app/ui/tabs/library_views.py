"""The contents of tab Library: the table of models, the chosen one's description, what a deletion removes."""

from __future__ import annotations

from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

from app.services.candidates import Entry
from app.services.deletion import describe, stays
from core.system.wording import format_bytes

if TYPE_CHECKING:
    from core.memory.pack.contents import Contents

COLUMNS = {
    "name": "Name",
    "kind": "Kind",
    "format": "Format",
    "bytes": "Size",
    "experts": "Experts",
    "used": "Last used",
}
NUMBERS = ("bytes", "experts", "used")  # sorted in descending order
WHERE = {"packs": "your packs", "cache": "Hugging Face cache", "folder": "your folders"}
EMPTY = (
    "<div class='empty-note'><b>No models found yet</b><span>Import one with the form next to this list, or add a "
    "folder with models below. Models in the Hugging Face cache of this machine are listed automatically.</span></div>"
)


def table(entries: list[Entry], chosen: str, sort: str, importing: str = "") -> str:
    """The list; `sort` is a column ("used" if unknown), `importing` the path of the pack being written."""
    sort = sort if sort in COLUMNS else "used"
    if not entries:
        return EMPTY
    key = {"experts": lambda e: e.layers * e.experts, "name": lambda e: e.name.lower()}.get(
        sort, lambda e: getattr(e, sort)
    )
    ordered = sorted(entries, key=key, reverse=sort in NUMBERS)
    heads = "".join(
        f'<th scope="col" class="{column}" aria-sort="{_direction(column) if column == sort else "none"}">'
        f'<button type="button" data-sort="{column}">{title}</button></th>'
        for column, title in COLUMNS.items()
    )
    rows = "".join(_row(entry, entry.path == chosen, entry.path == importing) for entry in ordered)
    return f'<table class="models" role="grid"><thead><tr>{heads}</tr></thead>{rows}</table>'


def _direction(column: str) -> str:
    return "descending" if column in NUMBERS else "ascending"


def _row(entry: Entry, chosen: bool, importing: bool) -> str:
    problem = "Import in progress." if importing else entry.problem
    cells = {
        "name": f"<b>{escape(entry.name)}</b>",
        "kind": escape(entry.kind),
        "format": escape(entry.format),
        "bytes": format_bytes(entry.bytes) if entry.bytes else "",
        "experts": experts(entry),
        "used": when(entry.used)[:10],
    }
    shown = "".join(f'<td class="{column}">{cell}</td>' for column, cell in cells.items())
    row = f'<tr><td colspan="{len(COLUMNS)}" class="why">{escape(problem)}</td></tr>' if problem else ""
    return (
        f'<tbody tabindex="0" data-path="{escape(entry.path, quote=True)}" aria-selected="{str(chosen).lower()}">'
        f"<tr>{shown}</tr>{row}</tbody>"
    )


def experts(entry: Entry) -> str:
    """Layers x experts, and the experts selected per token."""
    if not entry.experts:
        return ""
    top = f", top-{entry.top_k}" if entry.top_k else ""
    return f"{entry.layers or '?'} × {entry.experts}{top}"


def about(entry: Entry, problem: str = "") -> str:
    """Description of the chosen entry; `problem` overrides the entry's own."""
    rows = [
        ("Kind", f"{entry.kind}, in {WHERE[entry.where]}"),
        ("Expert format", entry.format),
        ("Size", format_bytes(entry.bytes) if entry.bytes else ""),
        ("Experts", experts(entry)),
        ("Last used", when(entry.used)),
        ("Path", entry.path),
    ]
    listed = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in rows if text)
    reason = problem or entry.problem
    why = f'<p class="why">{escape(reason)}</p>' if reason else ""
    return f'<div class="about-model"><h3>{escape(entry.name)}</h3><dl>{listed}</dl>{why}</div>'


def question(entry: Entry, what: Contents) -> str:
    """The confirmation of a deletion: what it removes, and what it leaves."""
    left = f"<p>{escape(stays(what))}</p>" if what.foreign else ""
    return (
        f"<p>Delete <b>{escape(entry.name)}</b> for good? This removes {escape(describe(what))}, from "
        f"<code>{escape(entry.path)}</code>.</p>{left}"
    )


def when(seconds: float) -> str:
    """Local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M") if seconds else "never"
