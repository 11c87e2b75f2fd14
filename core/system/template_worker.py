"""Renders chat templates in a process of its own. A template is a program that came with a model: jinja's sandbox keeps
it from files and from Python, but limits neither time nor memory, and Python's lock may be held by one multiplication.

`RENDERER` is the one such process of this application. What the worker imports is in this package, not in `core.hf`,
because that would import torch.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from core.system.limited_process import Answer, LimitedProcess, Limits
from core.system.wording import READ, reason


def prepare() -> Answer:
    """In the worker: the function that answers a request.

    A request is that of `encode`. A reply is a word, a line break, and text in UTF-8: "text" with the rendered chat,
    "rejected" with what the template says against it, or "damaged", "forbidden" or "failed" with the reason.
    """
    utils = _chat_template_utils()
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    normalize = getattr(utils, "_normalize_chat_messages", list)  # which apply_chat_template calls where there is one

    def rendered(request: bytes) -> tuple[str, str]:
        messages, options = json.loads(request)
        try:
            texts, _ = utils.render_jinja_template([normalize(messages)], **options)
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            return "damaged", f"in line {error.lineno}: {reason(error)}"
        except SecurityError as error:
            return "forbidden", reason(error)
        except TemplateError as error:
            if type(error) is TemplateError:  # just this class where the template calls raise_exception
                said = error.args[0]
                return "rejected", said[:READ] if isinstance(said, str) else "no reason was given"
            return "failed", reason(error)
        except Exception as error:  # an untrusted program can raise anything
            return "failed", reason(error)
        return "text", texts[0]

    def answer(request: bytes) -> bytes:
        kind, text = rendered(request)
        return f"{kind}\n{text}".encode("utf-8", "surrogatepass")

    answer(encode([{"role": "user", "content": "Hello"}], chat_template="{{ messages | tojson }}"))  # imports the rest
    return answer


def encode(messages: list[dict[str, Any]], **options: Any) -> bytes:
    """A request: a chat, and the options of transformers' `render_jinja_template`, special tokens among them. Raises
    TypeError, ValueError or RecursionError for what is no JSON."""
    return json.dumps([messages, options], ensure_ascii=False).encode("utf-8", "surrogatepass")


def _chat_template_utils() -> Any:
    """transformers' module that compiles and renders templates. The package around it, whose import takes several times
    as long, is left out if the module can do without."""
    name = "transformers.utils.chat_template_utils"
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent
    for package, folder in (("transformers", root), ("transformers.utils", root / "utils")):
        sys.modules[package] = bare = ModuleType(package)
        bare.__path__ = [str(folder)]
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError):
        for module in [one for one in sys.modules if one.partition(".")[0] == "transformers"]:
            del sys.modules[module]
        return importlib.import_module(name)


RENDERER = LimitedProcess(
    prepare, Limits(cpu_s=2.0, wall_s=60.0, memory_bytes=512 << 20, reply_bytes=16 << 20)
)  # a template takes milliseconds, of a chat of 20,000 messages 0.7 s; busy machines give it a third of their time
