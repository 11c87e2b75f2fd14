"""Checks every event of the dashboard against what its page can send, as read once from the Gradio page.

Gradio passes event data to the handlers unchecked, and responds 500 with a traceback when they fail on it."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import gradio as gr
from gradio.components import Component
from gradio.data_classes import FileData
from gradio.utils import get_upload_folder
from gradio_client.utils import is_valid_file
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

NO_EVENT = "This is not an event of the dashboard."
FIELDS = {"data", "event_data", "fn_index", "trigger_id", "session_hash"}
SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
TOO_LARGE = 2.0**63  # for any number of the page
CHOICES = (gr.Dropdown, gr.Radio, gr.CheckboxGroup)
KNOWN = (gr.Number, gr.Slider, gr.Checkbox, gr.Textbox, gr.File, gr.HTML, *CHOICES)


class Events:
    """The events of a page. Raises TypeError for a page with input components whose values cannot be checked here."""

    def __init__(self, page: gr.Blocks) -> None:
        self._page = page
        self._events = {number: event for number, event in page.fns.items() if event.fn is not None}
        inputs = {one._id: one for event in self._events.values() for one in event.inputs}
        if strange := next((type(one).__name__ for one in inputs.values() if not isinstance(one, KNOWN)), ""):
            raise TypeError(f"app/server/security/events.py has to say what a {strange} may hold.")
        self._initial = {number: getattr(one, "value", None) for number, one in inputs.items()}
        self._event_fields = {
            number: event_fields(one.fn) for number, one in self._events.items() if one.collects_event_data
        }

    def wrong(self, body: object) -> str:
        """The problem of an event's body, as a message for the client; "" if the page could have sent it."""
        try:
            self._check(body)
        except ValueError as error:
            return str(error)
        return ""

    def _check(self, body: object) -> None:
        _need(isinstance(body, dict) and FIELDS.issuperset(body), f"It is an object of {', '.join(sorted(FIELDS))}.")
        assert isinstance(body, dict)
        number, trigger, session = (body.get(name) for name in ("fn_index", "trigger_id", "session_hash"))
        _need(type(number) is int and number in self._events, "fn_index has to be the number of one of its events.")
        _need(trigger is None or type(trigger) is int, "trigger_id has to be a whole number or null.")
        _need(
            isinstance(session, str) and SESSION.fullmatch(session) is not None,
            "session_hash has to be up to 64 letters and digits.",
        )
        assert isinstance(number, int) and isinstance(session, str)
        inputs, data = self._events[number].inputs, body.get("data")
        _need(isinstance(data, list) and len(data) == len(inputs), f"data has to be a list of {len(inputs)} values.")
        assert isinstance(data, list)
        self._check_event_data(number, body.get("event_data"))
        now = self._page.state_holder.session_data.get(session)  # components as this tab has them, with its choices
        for at, (one, value) in enumerate(zip(inputs, data, strict=True), start=1):
            shown = one if now is None else now.blocks_config.blocks.get(one._id, one)
            label = one.label or one.elem_id or type(one).__name__
            _check_value(shown, value, self._initial[one._id], f"Input {at} ({label})", label)

    def _check_event_data(self, number: int, value: object) -> None:
        if (model := self._event_fields.get(number)) is None:  # unused values of any kind may be present
            return
        _need(isinstance(value, dict), "event_data has to be an object.")
        try:
            model.model_validate(value)
        except ValidationError as error:
            at = ".".join(map(str, error.errors()[0]["loc"][:1]))
            raise ValueError(f"{NO_EVENT} event_data needs another {at!r}.") from None


def event_fields(handler: Any) -> type[BaseModel]:
    """The fields of a handler's event data, from the annotations of the class it takes."""
    taken = next(
        hint for hint in get_type_hints(handler).values() if isinstance(hint, type) and issubclass(hint, gr.EventData)
    )
    hints = get_type_hints(taken, include_extras=True)
    if not hints:
        raise TypeError(f"{handler} takes a {taken.__name__}, which has no fields: see app/ui/event_data.py.")
    fields: dict[str, Any] = {
        name: (hint, None if type(None) in get_args(hint) else ...) for name, hint in hints.items()
    }
    return create_model(taken.__name__, __config__=ConfigDict(strict=True), **fields)


def _need(right: bool, what: str) -> None:
    if not right:
        raise ValueError(f"{NO_EVENT} {what}")


def _check_value(one: Component, value: Any, initial: Any, name: str, label: str) -> None:
    """Raises ValueError for a value that `one` cannot hold. Problems that a user can cause have messages for the
    user."""
    if value is None:
        if isinstance(one, gr.Slider):
            raise ValueError(f"“{label}” needs a number.")
        _need(initial is None or isinstance(one, gr.Number), f"{name} has to have a value.")
    elif isinstance(one, gr.Number | gr.Slider):
        _need(
            type(value) in (int, float) and math.isfinite(value) and abs(value) < TOO_LARGE,
            f"{name} has to be a number.",
        )
        if (one.minimum is not None and value < one.minimum) or (one.maximum is not None and value > one.maximum):
            ends = [f"{word} {end}" for word, end in (("from", one.minimum), ("up to", one.maximum)) if end is not None]
            raise ValueError(f"“{label}” takes numbers {' '.join(ends)}.")
    elif isinstance(one, gr.Checkbox):
        _need(isinstance(value, bool), f"{name} has to be true or false.")
    elif isinstance(one, gr.Textbox):
        _need(isinstance(value, str), f"{name} has to be a text.")
    elif isinstance(one, CHOICES):
        several = isinstance(one, gr.CheckboxGroup) or bool(getattr(one, "multiselect", False))
        _need(isinstance(value, list) == several, f"{name} has to be {'a list' if several else 'one'} of its choices.")
        _check_choices(one, value if several else [value], name, label)
    elif isinstance(one, gr.File):
        _check_file(one, value, name, label)
    else:
        _need(_alike(value, initial), f"{name} has to be as the page holds it.")


def _check_choices(one: Any, values: Iterable[Any], name: str, label: str) -> None:
    for value in values:
        if not any(type(value) is type(choice) and value == choice for _, choice in one.choices):
            _need(isinstance(value, str | int | float) and not isinstance(value, bool), f"{name} has to be a choice.")
            if not getattr(one, "allow_custom_value", False):
                raise ValueError(f"“{label}” does not offer {str(value)[:80]!r} any more. Reload the page.")
            _need(isinstance(value, str), f"{name} has to be a text.")


def _check_file(one: gr.File, value: object, name: str, label: str) -> None:
    try:
        file = FileData.model_validate(value, context={"validate_meta": True}, strict=True)
        found = uploaded(file.path, there=True)
    except (ValidationError, ValueError, TypeError):
        found = False
    _need(found, f"{name} has to be a file that was uploaded.")
    if one.file_types and not is_valid_file(file.path, one.file_types):
        raise ValueError(f"“{label}” takes only files of the kinds {', '.join(one.file_types)}.")


def uploaded(path: str, there: bool = False) -> bool:
    """Whether the path is in the upload folder and (with `there`) exists as a file. Links are followed."""
    try:
        inside = Path(path).resolve().is_relative_to(Path(get_upload_folder()).resolve())
        return inside and (not there or Path(path).is_file())
    except (OSError, ValueError, RuntimeError):  # too long, contains NUL, circular links
        return False


def _alike(value: object, initial: object) -> bool:
    """Whether the value has the keys and types of the page's initial value. Where that was None, a number is
    allowed."""
    if isinstance(initial, dict):
        return (
            isinstance(value, dict)
            and value.keys() == initial.keys()
            and all(_alike(value[key], initial[key]) for key in initial)
        )
    if initial is None:
        return value is None or (type(value) in (int, float) and math.isfinite(float(value)))  # type: ignore[arg-type]
    return type(value) is type(initial)
