"""JSON values that all later code can handle: the database, the models' tokenizers, Gradio."""

import json
import re
from typing import Annotated, Any

from anyio import to_thread
from pydantic import Field

MOST_DEPTH = 100  # nesting of lists and objects
MOST_WHOLE = 2**63  # integers are smaller than this: ids and seeds, here and in the database
# What needs a full check: lone surrogates, long numbers, and anything that is not plain UTF-8.
SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\d{19}|\xed[\xa0-\xbf]|\x00|^\xff\xfe|^\xfe\xff")

RowId = Annotated[int, Field(ge=0, lt=MOST_WHOLE)]
"""A number under which the store has something, as a route takes it from an address."""


async def wrong(body: bytes) -> str:
    """The problem of a JSON body, or "". The few that need a full check are checked in a thread."""
    deep = body.count(b"[") + body.count(b"{") > MOST_DEPTH
    if not deep and SUSPECT.search(body) is None:
        return ""
    return await to_thread.run_sync(wrong_with, body)


def wrong_with(body: bytes) -> str:
    """Why a JSON body cannot be processed, or "". Invalid JSON is left to later code to report."""
    try:
        value = json.loads(body, parse_int=_whole)
        if _depth(value) > MOST_DEPTH:
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        return f"The request has more than {MOST_DEPTH} lists and objects inside one another. Send it flatter."
    except OverflowError:
        return "The request holds a whole number beyond 63 bits. Ids and seeds are smaller than that."
    except UnicodeEncodeError:
        return (
            "The request contains an unpaired surrogate, which is not a character and cannot be stored or "
            "read by a model. Send whole characters."
        )
    except ValueError:
        return ""
    return ""


def _whole(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= MOST_WHOLE:
        raise OverflowError
    return int(digits)


def _depth(value: Any) -> int:
    """Nesting of lists and objects, counted only as far as needed."""
    level, depth = [value], 0
    while level and depth <= MOST_DEPTH:
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (list, dict))]
        depth += bool(inner)
        level = [one for group in inner for one in group if isinstance(one, (list, dict))]
    return depth
