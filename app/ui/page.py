"""The page: sidebar, tabs, and the redraws that synchronise every open tab with the host."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.server.live_state import host_state
from app.server.uploads import AGES_S
from app.services.host import Host
from app.ui.controls import LIVE, html
from app.ui.served import ServedNow
from app.ui.sidebar import CacheSection, ModelSection, SamplingSection, SubstitutionSection
from app.ui.tabs.analysis import AnalysisTab
from app.ui.tabs.batch import BatchTab
from app.ui.tabs.beside import BesideTab
from app.ui.tabs.calibrate import CalibrateTab
from app.ui.tabs.chat_live import ChatLive, Shown
from app.ui.tabs.library import LibraryTab
from app.ui.tabs.quality import QualityTab
from app.ui.tabs.sessions import Sessions
from app.ui.tabs.system import SystemTab
from app.ui.theme import ROOT

OPEN_JS = "(shown, known) => [{...shown, chat: +new URLSearchParams(location.search).get('chat') || null}, known]"
SETTLE_JS = "(redrawn) => window.moestroSettle(redrawn)"  # pulse.js: nothing, if a control has been changed since
BRAND = (
    '<a class="skip" href="#message" data-skip>To the message</a>'
    '<div class="brand"><h1>Moestro</h1><button type="button" data-theme-toggle title="Dark or light" '
    'aria-label="Switch between dark and light">◐</button></div>'
)
PAGES = 32  # pages for which Gradio keeps a copy of every component, 0.7 MB each and never freed
SCRIPT = (ROOT / "assets" / "ui" / "page.js").read_text(encoding="utf-8")


def create_ui(host: Host) -> gr.Blocks:
    """Build the dashboard on a host. Events are unqueued, so no tab holds a connection open."""
    with ServedNow(
        title="Moestro", fill_width=True, fill_height=True, analytics_enabled=False, delete_cache=AGES_S
    ) as ui:
        # least recently used pages are dropped; a dropped page starts from initial values
        ui.state_session_capacity = PAGES
        page = Page(host)
        page.wire(ui)
        # At each event, the browser reports progress to every output, though none shows it: 100 ms and more for some
        # 200 components. One invisible component gets it instead.
        for event in ui.fns.values():
            event.show_progress_on = [page.known]
    ui.now = page.now
    return ui


class Page:
    """Builds the components. `known` holds the page's state: the stamps of the host that it shows."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.known = gr.HTML(
            {"stamp": "", "settings": "", "library": "", "loaded": "", "imported": "", "answers": "0"},
            html_template="",
            elem_id="known",
            apply_default_css=False,
            js_on_load='import("/ui/pulse.js").then((m) => m.know(element, props, trigger));',
        )
        self.redrawn = gr.HTML(
            {"values": []}, html_template="", elem_id="redrawn", apply_default_css=False, js_on_load=None
        )
        with gr.Sidebar(width=320, open=True, elem_id="sidebar"):
            html(BRAND, elem_id="brand")
            self.mode = gr.Radio(
                ["Simple", "Advanced"],
                value="Simple",
                show_label=False,
                container=False,
                label="Detail",
                elem_id="mode",
            )
            self.model = ModelSection(host, self.known)
            self.cache = CacheSection(host, self.model.form, self.model.fit, self.model.refit)
            self.substitution = SubstitutionSection(host)
            self.sampling = SamplingSection(host)
            self.sections = (self.cache, self.substitution, self.sampling)
        self.model.bar.show()
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Chat + Live", id="chat", elem_id="tab-chat"):
                self.chat = ChatLive(host, self.model.bar.loaded)
            with gr.Tab("Library", id="library", elem_id="tab-library") as self.models:
                self.library = LibraryTab(host, self.model, tabs)
            with gr.Tab("Calibrate", id="calibrate", elem_id="tab-calibrate"):
                CalibrateTab(host)
            with gr.Tab("Analysis", id="analysis") as self.analysed, gr.Tabs(elem_id="analyses"):
                with gr.Tab("Caches and prefetchers", id="routing"):
                    self.analysis = AnalysisTab(host)
                with gr.Tab("Quality", id="quality"):
                    QualityTab(host)
                with gr.Tab("A beside B", id="beside"):
                    BesideTab(host)
            with gr.Tab("Batch", id="batch"):
                BatchTab(host)
            with gr.Tab("Sessions", id="sessions") as self.past:
                self.sessions = Sessions(host, self.chat, tabs)
            with gr.Tab("System", id="system", elem_id="tab-system") as self.machine:
                self.system = SystemTab(host)

    def wire(self, ui: gr.Blocks) -> None:
        """Attach the events that redraw several parts."""
        known, model, chat, library, sessions = self.known, self.model, self.chat, self.library, self.sessions
        now = [known, chat.pulse, *model.form]
        known.tick(self.model_moved, now, [*model.outputs, *chat.outputs, model.fit, self.cache.pcie.box], **LIVE)
        settled = [*(one for section in self.sections for one in section.outputs), model.fit]
        moved = known.apply(self.settings_moved, now, self.redrawn, **LIVE)
        moved.then(None, self.redrawn, [known, *settled], js=SETTLE_JS, **LIVE)
        for chosen in self.cache.chosen:
            chosen.then(self.substitution.values, None, self.substitution.outputs, **LIVE)
        ended = [known, model.fit, self.cache.preset.account]
        known.submit(self.answers_moved, [known, *model.form], ended, **LIVE)
        known.edit(library.values, library.moving, library.moved, **LIVE)
        shown = [*chat.page, *chat.outputs, *model.form_outputs, *model.outputs, model.fit, self.cache.pcie.box]
        ui.load(self.open_page, [chat.pulse, known], list(dict.fromkeys(shown)), js=OPEN_JS, **LIVE)
        ui.load(None, None, self.mode, js=SCRIPT, **LIVE)
        self.mode.input(None, self.mode, None, js="(mode) => window.moestroMode(mode)", **LIVE)
        self.analysed.select(self.analysis.look, self.analysis.source, self.analysis.looked, **LIVE)
        self.models.select(library.look, library.looking, library.looked, **LIVE)
        self.machine.select(self.system.read_log, None, self.system.lines, **LIVE)
        self.past.select(lambda shown: sessions.show(shown.get("chat")), chat.pulse, sessions.outputs, **LIVE)

    def model_moved(self, known: Shown, page: Shown, *form: Any) -> list[Any]:
        """A model was loaded or unloaded, or a load failed."""
        return [*self.model.values(known), *self.chat.values(page), self.model.refit(*form), self.cache.pcie.value()]

    def settings_moved(self, known: Shown, page: Shown, *form: Any) -> dict[str, list[Any]]:
        """A setting changed, perhaps in another tab. The page itself puts this in place (`SETTLE_JS`)."""
        return {
            "values": [
                {**known, "settings": host_state(self.host)["settings"]},
                *(value for section in self.sections for value in section.values()),
                self.model.refit(*form),
            ]
        }

    def answers_moved(self, known: Shown, *form: Any) -> list[Any]:
        """Answers have ended: the estimate goes by them, and Auto accounts for its choices."""
        note = self.cache.preset.explained()
        return [{**known, "answers": host_state(self.host)["answers"]}, self.model.refit(*form), note]

    def now(self) -> dict[Any, Any]:
        """What a page shows from its first moment on, in every chat."""
        settings = host_state(self.host)["settings"]  # the stamp first: never too new
        shown = {self.known: {**self.known.value, "settings": settings}, **self._form()}
        sections = [(section.outputs, section.values()) for section in self.sections]
        for part, values in (*sections, (self.model.outputs[1:], self.model.values({})[1:])):
            shown |= dict(zip(part, values, strict=True))
        chat = dict(zip(self.chat.outputs, self.chat.values({}), strict=True))
        return shown | {one: chat[one] for one in (self.chat.text, self.chat.model, self.chat.plain)}

    def _form(self) -> dict[Any, Any]:
        """The form as last used, and the verdict on it."""
        form = self.model.form_values()
        fit = self.model.refit(*(one["value"] for one in form[:-1]))
        return {**dict(zip(self.model.form_outputs, form, strict=True)), self.model.fit: fit}

    def open_page(self, page: Shown, known: Shown) -> dict[Any, Any]:
        """Show the chat in the URL. What the page was served with is shown again, so that the server knows it, too: the
        limits of the form, and what may have changed since."""
        opened, *rest = self.chat.open(page.get("chat"))
        shown = dict(zip(self.chat.page, ({**opened, "turn": page["turn"]}, *rest), strict=True))
        shown |= dict(zip(self.chat.outputs, self.chat.values(page), strict=True))
        shown |= dict(zip(self.model.outputs, self.model.values(known), strict=True))
        return shown | self._form() | {self.cache.pcie.box: self.cache.pcie.value()}
