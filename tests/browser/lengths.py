"""How long answers are in the dashboard's tests: "... in 30 words" has an end; any other goes on until it is stopped.
"Say BASE64" is answered with that very text.

An answer that ends by itself cannot be stopped, reloaded or watched: on a busy machine it is over before the page has
seen it.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.settings.param import declared
from core.settings.sampling import Sampling

ENDLESS = int(declared(Sampling)["max_new_tokens"].high or 0)


def with_length(prompt: Sequence[Mapping[str, str]] | str, sampling: Sampling) -> Sampling:
    """The sampling of an answer to `prompt`, as long as its last message asks."""
    asked = re.search(r" in (\d+) words", prompt if isinstance(prompt, str) else prompt[-1]["content"])
    return replace(sampling, max_new_tokens=int(asked[1])) if asked else sampling


def say(text: str) -> str:
    """The message that is answered with `text`, and does not itself hold it."""
    return f"Say {base64.b64encode(text.encode()).decode()}"


def said(prompt: Sequence[Mapping[str, str]] | str) -> list[str] | None:
    """The pieces of the answer that the last message asks for; None if it leaves that to the model."""
    asked = re.fullmatch(r"Say ([\w+/=]+)", prompt if isinstance(prompt, str) else prompt[-1]["content"])
    return re.findall(r"[\s\S]{1,40}", base64.b64decode(asked[1]).decode()) if asked else None
