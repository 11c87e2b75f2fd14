"""The look of the dashboard: Gradio's theme, and our own style sheets and scripts. Nothing is loaded from other
sites.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"/ui/deck": ROOT / "app" / "ui" / "deck", "/ui": ROOT / "assets" / "ui"}
HEAD = """<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="/ui/app.css"><link rel="stylesheet" href="/ui/chat/chat.css">
<link rel="stylesheet" href="/ui/chat/list.css"><link rel="stylesheet" href="/ui/deck/deck.css">
<link rel="stylesheet" href="/ui/deck/lossy.css"><link rel="stylesheet" href="/ui/deck/limit.css">
<link rel="stylesheet" href="/ui/jobs.css">
<link rel="stylesheet" href="/ui/simple.css">"""


def head() -> str:
    """The page's head: our style sheets, and where KaTeX is among the assets of the installed Gradio (its names change
    with every version). Without it, formulas are shown as they were written.
    """
    assets = Path(gr.__file__).parent / "templates" / "frontend" / "assets"
    found = [next((one.name for one in sorted(assets.glob(f"katex-*.{kind}"))), "") for kind in ("js", "css")]
    katex = " ".join(f"/assets/{name}" for name in found) if all(found) else ""
    return f'{HEAD}\n<meta name="katex" content="{katex}">'


class Fresh(StaticFiles):
    """Serves only the folder's scripts and style sheets. Browsers revalidate them each time, so that an update of
    Moestro takes effect at once.
    """

    async def get_response(self, path: str, scope: Scope) -> Response:
        if not path.endswith((".js", ".css")):
            return PlainTextResponse("There is no such page.", 404)
        answer = await super().get_response(path, scope)
        answer.headers["cache-control"] = "no-cache"
        return answer


def serve_assets(app: FastAPI) -> None:
    """Mount our own style sheets and scripts with explicit types: Windows may call .js text/plain, which browsers
    refuse as a module.
    """
    mimetypes.add_type("text/javascript", ".js")
    mimetypes.add_type("text/css", ".css")
    for prefix, folder in PAGES.items():
        app.mount(prefix, Fresh(directory=folder))


def theme() -> gr.themes.Base:
    """Calm slate and indigo in light and dark, with the system's fonts."""
    base = gr.themes.Base(
        primary_hue="indigo",
        neutral_hue="slate",
        radius_size="md",
        spacing_size="sm",
        text_size="sm",
        font=["system-ui", "-apple-system", "Segoe UI", "sans-serif"],
        font_mono=["ui-monospace", "Consolas", "monospace"],
    )
    return base.set(
        body_background_fill="#f6f8fb",
        body_background_fill_dark="#0b1120",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#141d2f",
        background_fill_secondary="#f1f4f9",
        background_fill_secondary_dark="#0f1729",
        block_background_fill="#ffffff",
        block_background_fill_dark="#141d2f",
        border_color_primary="#e2e8f0",
        border_color_primary_dark="#26324a",
        input_background_fill="#ffffff",
        input_background_fill_dark="#0c1322",
        input_border_color="#cbd5e1",
        input_border_color_dark="#2c3a55",
        input_border_width="1px",
        block_label_text_size="12px",
        block_info_text_size="11.5px",
        block_info_text_color="#5b6778",
        block_info_text_color_dark="#94a3b8",
        body_text_color_subdued="#5b6778",
        body_text_color_subdued_dark="#94a3b8",
        button_primary_background_fill="#4f46e5",
        button_primary_background_fill_dark="#4f46e5",
        button_primary_background_fill_hover="#4338ca",
        button_primary_background_fill_hover_dark="#6366f1",
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark="#ffffff",
        slider_color="#4f46e5",
        slider_color_dark="#6366f1",
    )
