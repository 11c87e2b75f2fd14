"""Tab Library: the models on this machine, and importing one into a pack."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from app.server.live_state import host_state
from app.services.candidates import is_gone
from app.services.deletion import inspect
from app.services.host import Host
from app.services.importer import AUTO, CHOICES
from app.ui.controls import LIVE, ONCE, button, change_events, html, progress
from app.ui.event_data import HubPicked, RowPicked
from app.ui.news import Shown, news, noticed
from app.ui.sidebar import ModelSection
from app.ui.tabs.hub_search import HubSearch, for_page
from app.ui.tabs.library_views import COLUMNS, about, question, table
from app.ui.text import notice
from app.wording import name_of
from core.errors import MoestroError
from core.settings.formats import FORMATS

# State of the list: its "html", the path that is "chosen", the column it is sorted by.
List = dict[str, str]


class LibraryTab:
    """The list and the chosen model on the left and right, the import below. `outputs` are those of `show`."""

    def __init__(self, host: Host, model: ModelSection, tabs: gr.Tabs) -> None:
        self.host, self.known, self.model = host, model.known, model
        with gr.Row(elem_id="library", equal_height=False):
            with gr.Column(scale=7, min_width=320, elem_id="library-list"):
                with gr.Row(elem_classes="head-row"):
                    html("<h2>Models on this machine</h2>")
                    self.refresh = button("Refresh", "library-refresh", min_width=90, scale=0)
                self.list = gr.HTML(
                    {"html": "", "chosen": "", "sort": "used"},
                    html_template="${value.html}",
                    elem_id="models",
                    apply_default_css=False,
                    js_on_load='import("/ui/library.js").then((m) => m.start(element, props, trigger, watch));',
                )
                self.folders = gr.Dropdown(
                    [],
                    value=host.library.folders,
                    multiselect=True,
                    allow_custom_value=True,
                    elem_id="folders",
                    label="Your folders",
                    info="Searched two levels deep for packs, GGUF files and models. Type a path and press Enter.",
                )
            with gr.Column(scale=4, min_width=300):
                self._build_card()
                self._build_form()
        self.outputs = [
            self.list,
            self.card,
            self.about,
            self.open,
            self.take,
            self.delete,
            self.confirm,
            self.question,
            self.alert,
        ]
        self._wire(model, tabs)

    def _build_card(self) -> None:
        with gr.Column(visible=False, elem_id="model-card") as self.card:
            self.about = html(elem_id="model-about")
            with gr.Row(elem_classes="buttons"):
                self.open = button("Open", "open-model", variant="primary")
                self.take = button("Import…", "import-this")
                self.delete = button("Delete…", "delete-model")
            with gr.Row(visible=False, elem_classes="confirm", elem_id="confirm-model") as self.confirm:
                self.question = html()
                self.yes = button("Delete", "delete-model-yes", variant="stop")
                self.no = button("Keep", "delete-model-no")
        self.alert = html(elem_id="library-alert")

    def _build_form(self) -> None:
        formats = [(AUTO, "auto"), *((f"{name}: {FORMATS[name].help}", name) for name in CHOICES[1:])]
        with gr.Column(elem_id="import-form"):
            html(
                "<h3>Import a model</h3><p class='minor'>It is converted to an expert pack, which loads quickly "
                "and can leave experts on disk where memory is short. The source is not changed.</p>"
            )
            self.source = gr.Textbox(
                "",
                label="Model to import",
                max_lines=1,
                elem_id="import-source",
                info="A folder, a GGUF file, or a name on the Hugging Face hub.",
            )
            self.format = gr.Dropdown(
                formats,
                value="auto",
                label="Expert format",
                filterable=False,
                elem_id="import-format",
                info="Number format of the expert weights.",
            )
            self.out = gr.Textbox(
                "",
                label="Output folder",
                max_lines=1,
                elem_id="import-out",
                placeholder=str(self.host.library.packs),
                info="Empty: a new folder among your packs.",
            )
            self.download = gr.Checkbox(
                label="Allow download", elem_id="import-download", info="Without it, nothing is requested from the hub."
            )
            self.hub = HubSearch(self.host.library.packs, self.download)
            self.forecast = html(elem_id="import-forecast")
            self.failed = html(elem_id="import-alert")
            progress("Importing the model", elem_id="import-progress")
            with gr.Row(elem_classes="buttons"):
                self.start = button("Import", "import-start", variant="primary")
                self.cancel = button("Cancel", "import-cancel")
                self.resume = button("Resume", "import-resume")
                self.opened = button("Open it", "import-open")

    def show(self, now: List, confirmation: str | None = None, message: str = "") -> list[Any]:
        """The list as last found, and the chosen entry, if it still exists.

        `confirmation`: the question before its deletion, "" hides it; None leaves it, and the last message, unchanged.
        """
        entry, busy = self.host.library.find(now["chosen"]), self._being_made()
        shown = {**now, "chosen": entry.path if entry else ""}
        shown["html"] = table(self.host.library.entries(), shown["chosen"], now["sort"], busy)
        mine = entry is not None and entry.path != busy
        deletable = mine and entry is not None and entry.can_delete
        return [
            shown,
            gr.update(visible=entry is not None),
            about(entry, "" if mine else "Import in progress.") if entry else "",
            gr.update(visible=entry is not None and entry.can_open),
            gr.update(visible=entry is not None and entry.can_import),
            gr.update(visible=deletable),
            *(
                [gr.skip()] * 3
                if confirmation is None
                else [gr.update(visible=bool(confirmation) and deletable), confirmation, message]
            ),
        ]

    def look(self, known: Shown, now: List, folders: list[str] | None) -> list[Any]:
        """Search again, then show, with the folders as stored if the page had others: entered text stays.
        With the page's state as it was: after a late answer the page asks for a redraw. Outputs: `looked`."""
        self.host.library.refresh()
        stored = self.host.library.folders
        return [known, *self.show(now), gr.skip() if list(folders or []) == stored else stored]

    @property
    def looking(self) -> list[Any]:
        """The components that `look` reads."""
        return [self.known, self.list, self.folders]

    @property
    def looked(self) -> list[Any]:
        """The components that `look` updates."""
        return [self.known, *self.outputs, self.folders]

    def values(self, known: Shown, now: List, chosen: str | None) -> list[Any]:
        """Update after a change on the server: an import ended, another tab deleted an entry; `chosen` = the model in
        the sidebar. Outputs: `moved`.
        """
        stamp, job = host_state(self.host)["library"], self.host.importer.job  # the stamp first: never too new
        text, kind, kept = "", "info", ""
        if job is not None and job.can_resume:
            kept = f" What {job.kept} is kept: Resume continues from there."
        if job is not None and job.state == "error":
            text, kind = for_page(job.error) + kept, "error"
        elif job is not None and job.state == "cancelled":
            text = f"The import of {name_of(job.source)} was stopped.{kept}"
        elif job is not None and job.state == "done" and not is_gone(self._made()):
            text = f"{name_of(job.source)} is imported, and in the list. The pack is {job.out}."
        mark, update = news(known.get("imported", ""), job, notice(text, kind))
        return [{**known, "library": stamp, "imported": mark}, update, self.model.offer(chosen or ""), *self.show(now)]

    @property
    def moving(self) -> list[Any]:
        """The components that `values` reads."""
        return [self.known, self.list, self.model.model]

    @property
    def moved(self) -> list[Any]:
        """The components that `values` updates."""
        return [self.known, self.failed, self.model.model, *self.outputs]

    def _wire(self, model: ModelSection, tabs: gr.Tabs) -> None:
        self.list.select(self._pick, self.list, self.outputs, **LIVE)
        self.refresh.click(self.look, self.looking, self.looked, **ONCE)
        self.folders.change(self._folders, [self.list, self.folders], self.outputs, **LIVE)
        opening = [self.alert, tabs, *model.opened]
        chosen = [self.list, model.known]
        self.open.click(lambda now, known: self._open(model, now["chosen"], known), chosen, opening, **ONCE)
        self.opened.click(lambda known: self._open(model, self._made(), known), model.known, opening, **ONCE)
        self.take.click(self._take, [self.list, self.format], [self.source, self.forecast], **ONCE)
        for event in (*change_events(self.source), *change_events(self.format)):
            event(self._forecast, [self.source, self.format], self.forecast, **LIVE)
        self.delete.click(self._ask, self.list, self.outputs, **ONCE)
        self.no.click(lambda now: self.show(now, ""), self.list, self.outputs, **ONCE)
        self.yes.click(self._delete, self.list, self.outputs, **ONCE)
        form, noted = [self.source, self.format, self.out, self.download], [self.known, self.failed]
        self.start.click(noticed(self.host.importer.start), [self.known, *form], noted, **ONCE)
        hub = [self.known, self.format, self.download]
        self.hub.found.select(self._import_found, hub, [*noted, self.source], **ONCE)
        self.cancel.click(self.host.importer.cancel, None, None, **ONCE)
        self.resume.click(noticed(self.host.importer.resume), self.known, noted, **ONCE)

    def _pick(self, now: List, event: RowPicked) -> list[Any]:
        """A row was selected or a column header clicked."""
        if (column := getattr(event, "sort", None)) in COLUMNS:
            return self.show({**now, "sort": column})
        again = getattr(event, "again", False)  # only redrawn
        return self.show({**now, "chosen": getattr(event, "entry", None) or ""}, None if again else "")

    def _take(self, now: List, format: str | None) -> list[Any]:
        return [now["chosen"], self._forecast(now["chosen"], format)]

    def _import_found(self, known: Shown, format: str, download: bool, picked: HubPicked) -> list[Any]:
        """Download and import a model of the hub, with the format that was chosen."""
        start = noticed(self.host.importer.start)
        return [*start(known, picked.source, format, "", download), picked.source]

    def _forecast(self, source: str | None, format: str | None) -> str:
        """What an import would make of the model in the form, or why it would be refused."""
        try:
            lines = self.host.importer.forecast(source or "", format or "")
        except MoestroError as error:
            return notice(str(error))
        return "".join(f"<p class='minor'>{escape(line)}</p>" for line in lines)

    def _folders(self, now: List, folders: list[str] | None) -> list[Any]:
        if list(folders or []) != self.host.library.folders:
            self.host.library.set_folders(folders or [])
            self.host.library.refresh()
        return self.show(now)

    def _open(self, model: ModelSection, path: str, known: Shown) -> list[Any]:
        try:
            return ["", gr.Tabs(selected="chat"), *model.open(path, known)]
        except MoestroError as error:
            return [notice(str(error)), *[gr.skip()] * (1 + len(model.opened))]

    def _ask(self, now: List, problem: str = "") -> list[Any]:
        """Show what the deletion of the chosen entry removes and leaves, to be confirmed."""
        entry = self.host.library.find(now["chosen"])
        try:
            confirmation = question(entry, inspect(entry)) if entry else ""
        except MoestroError as error:
            return self.show(now, "", notice(str(error)))
        return self.show(now, confirmation, notice(problem))

    def _delete(self, now: List) -> list[Any]:
        try:
            done = self.host.delete_model(now["chosen"])
        except MoestroError as error:
            return self._ask(now, str(error))
        return self.show({**now, "chosen": ""}, "", notice(done, "info"))

    def _made(self) -> str:
        job = self.host.importer.job
        return str(job.out) if job is not None and job.out is not None else ""

    def _being_made(self) -> str:
        job = self.host.importer.job
        return str(job.partial) if job is not None and not job.finished and job.partial is not None else ""
