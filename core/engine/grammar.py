"""The JSON schema or grammar of a request, as llguidance has it. Imports no torch: a request is judged without a model.

Grammars are in the library's form of Lark. JSON is written in one line, as Python's json.dumps writes it: free white
space would let a model write nothing else for ever.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import PromptError
from core.settings.sampling import Sampling

FORM: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SHOWN = 200  # characters of an error of the library
NOT_INSTALLED = "Answers can keep to a JSON schema when the package llguidance is installed, and here it is not."


def require(sampling: Sampling) -> str:
    """The schema or grammar of a request as the library has it. Raises PromptError for one that no model's answers can
    keep to."""
    matcher = library()
    try:
        if sampling.grammar:
            grammar: str = matcher.grammar_from_lark(sampling.grammar)
        else:
            grammar = matcher.grammar_from_json_schema(sampling.schema, dict(FORM))
        wrong = matcher.validate_grammar(grammar)
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise refused(wrong)
    return grammar


def library() -> Any:
    """The class of its matchers. Raises PromptError where it is not installed."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise PromptError(NOT_INSTALLED) from None
    return LLMatcher


def refused(error: str) -> PromptError:
    """Of a schema, with what the library says of it."""
    reason = " ".join(error.split())[:SHOWN] or "it cannot be used"
    return PromptError(f"The answer cannot keep to this JSON schema: {reason}. Change it, or leave it out.")
