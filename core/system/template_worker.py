"""Renders chat templates in a process of its own. A template is a program that came with a model: jinja's sandbox keeps
it from files and from Python, but limits neither time nor memory, and Python's lock may be held by one multiplication.

`RENDERER` is the one such process of this application. transformers is imported in that process alone, without torch.
"""

from __future__ import annotations

import json
from typing import Any

from core.system.limited_process import Answer, LimitedProcess, Limits
from core.system.wording import reason


def prepare() -> Answer:
    """In the worker: the function that answers a request.

    A request is JSON: the tokenizer's "template" and "special" tokens, and the "messages" and "options" of
    `apply_chat_template`. A reply is a word, a line break, and text in UTF-8: "text" with the rendered chat, "rejected"
    with what the template says against it, or "damaged", "forbidden" or "failed" with the reason.
    """
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    class Tokenizer:
        """As much of a tokenizer as rendering looks at."""

        apply_chat_template = PreTrainedTokenizerBase.apply_chat_template
        get_chat_template = PreTrainedTokenizerBase.get_chat_template

        def __init__(self, template: Any, special: Any) -> None:
            self.chat_template, self.special_tokens_map = template, special

    def rendered(request: bytes) -> tuple[str, str]:
        asked = json.loads(request)
        tokenizer = Tokenizer(asked["template"], asked["special"])
        try:
            text = tokenizer.apply_chat_template(asked["messages"], tokenize=False, **asked["options"])
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            return "damaged", f"in line {error.lineno}: {reason(error)}"
        except SecurityError as error:
            return "forbidden", reason(error)
        except TemplateError as error:  # of just this class where the template calls raise_exception
            return "rejected" if type(error) is TemplateError else "failed", reason(error)
        except Exception as error:  # an untrusted program can raise anything
            return "failed", reason(error)
        return "text", text

    def answer(request: bytes) -> bytes:
        kind, text = rendered(request)
        return f"{kind}\n{text}".encode("utf-8", "surrogatepass")

    answer(encode("{{ messages | tojson }}", {}, [{"role": "user", "content": "Hello"}], {}))  # and all it imports
    return answer


def encode(template: Any, special: Any, messages: Any, options: Any) -> bytes:
    """A request. Raises TypeError, ValueError or RecursionError for what is no JSON."""
    request = {"template": template, "special": special, "messages": messages, "options": options}
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")


RENDERER = LimitedProcess(
    prepare, Limits(cpu_s=5.0, wall_s=60.0, memory_bytes=512 << 20, reply_bytes=16 << 20)
)  # a template takes milliseconds
