"""A page that is served as things are. Gradio alone serves its components as they were when the page was built, before
the first load, and they would stay so until the server's first answers come, seconds later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr
from gradio.components import Component


class ServedNow(gr.Blocks):  # type: ignore[misc]  # read as Any
    """Once `now` is set, every copy of the page is made with what it returns: values, or `gr.update`s of components."""

    now: Callable[[], Mapping[Component, Any]] | None = None
    _config: dict[str, Any]

    @property
    def config(self) -> Any:
        """What Gradio puts into the page."""
        if self.now is not None:
            props = {one["id"]: one["props"] for one in self._config["components"]}
            for component, update in self.now().items():
                changes = update if isinstance(update, dict) and "__type__" in update else {"value": update}
                changes = {name: value for name, value in changes.items() if name != "__type__"}
                if "value" in changes:
                    changes |= {"value": component.postprocess(changes["value"])}
                props[component._id].update(changes)
        return self._config

    @config.setter
    def config(self, config: Any) -> None:
        self._config = config
