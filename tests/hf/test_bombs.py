"""What hypothesis makes of Jinja's filters, globals, operators and methods, with huge numbers: each ends in text or in
a clear error, within the limits of time and memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE, DEFAULT_TESTS
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from core.errors import PromptError
from core.hf import chat_template
from core.system.template_worker import RENDERER
from tests.fuzz.oracle import unclear
from tests.selection import examples
from tests.tiny_tokenizer import save_tokenizer

CHAT = [{"role": "user", "content": "a <b> c.\nhttp://d.e"}]
BEGIN = "{% set n = messages | length + 8 %}"  # 9, which is not known when the template is compiled
SHARE = 100 << 20  # of this process' own memory
HUGE = [f"n * 10 ** {power}" for power in (1, 3, 5, 6, 7, 8, 9, 12, 30)]
NUMBERS = ["0", "1", "-1", "2", "n", *HUGE, "-n * 10 ** 8", "n ** n ** 2", "n ** n ** n", "1e300", "0.5", "10 ** 9"]
BITS = ["true", "false"]
TEXTS = ["''", "'a'", "'a b'", "'\\n'", "'%*d|%s'", "'{:>99999999}'", "'&<x y=\"z\">'", "'http://x.y '", "'\\t'", "'ß'"]
OTHERS = [
    *("messages", "messages[0]", "[1, 'a', none]", "{'a': 1}", "range(n)", "range(10 ** 5)", "none", "nothing"),
    *("cycler('a', 'b')", "joiner(', ')", "namespace(a=1)", "dict(a=[1])", "lipsum()", "true", "bos_token"),
]
OPERATORS = ["*", "**", "~", "+", "%", "//", "-", "in", "<"]


def named(text: str) -> dict[str, str]:
    """What each takes: n a number, t a text, b true or false, f, s and a the name of a filter, of a test and of an
    attribute, v anything."""
    return {name: kinds for name, _, kinds in (one.partition(":") for one in text.split())}


FILTERS = dict.fromkeys(DEFAULT_FILTERS, "") | named(
    "attr:a batch:nv center:n d:vb default:vb dictsort:b filesizeformat:b float:n format:nv groupby:a indent:nbb "
    "int:nn join:t map:f reject:sv rejectattr:asv replace:ttn round:n select:sv selectattr:asv slice:nv sort:b sum:a "
    "tojson:n trim:t truncate:nbtn unique:b urlize:nb wordwrap:nbt xmlattr:b"
)
METHODS = named(
    "center:nt ljust:nt zfill:n expandtabs:n format:nv replace:ttn join:v split:tn splitlines:b translate:v encode "
    "upper count:t items to_bytes:n bit_length next append:v get:av index:v"
)
CALLS = named("range:nnn lipsum:nbnn cycler:vvv joiner:t namespace:v dict:v")
LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
AROUND = [  # what is done with an expression
    *("{{ %s }}", "{{ (%s) | length }}", "{{ (%s) | list | length }}", "{{ (%s) | string | length }}"),
    *("{% set x = %s %}", "{% for i in (%s) %}{{ i }}{% endfor %}", "{% if %s %}yes{% endif %}"),
    *(LOOP + LOOP + "{{ %s }}" + END + END, LOOP + "{% set x = %s %}" + END),
    "{% set x = namespace(a=n) %}{% for i in range(40) %}{% set x.a = [x.a, x.a, %s] %}{% endfor %}{{ x.a }}",
    "{% set x = namespace(a='ab') %}{% for i in range(40) %}{% set x.a = x.a ~ x.a ~ (%s) %}{% endfor %}{{ x.a }}",
    "{% macro m(d) %}{{ %s }}{{ m(d + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ raise_exception(%s) }}",
    "{{ strftime_now(%s) }}",
]

names = st.sampled_from(sorted(DEFAULT_FILTERS)).map(repr), st.sampled_from(sorted(DEFAULT_TESTS)).map(repr)
simple = {
    "n": st.sampled_from(NUMBERS),
    "t": st.one_of(
        st.sampled_from(TEXTS), st.builds("({} * ({}))".format, st.sampled_from(TEXTS), st.sampled_from(HUGE))
    ),
    "b": st.sampled_from(BITS),
    "f": names[0],
    "s": names[1],
    "a": st.sampled_from(["'content'", "'a'", "0", "'x.y'"]),
}
leaf = st.one_of(
    simple["n"],
    simple["t"],
    st.sampled_from(OTHERS),
    st.builds("([{}] * ({}))".format, st.sampled_from(OTHERS), st.sampled_from(HUGE)),
)


def given_to(kinds: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """The first of its arguments, or all."""
    each = [simple.get(kind, values) for kind in kinds]
    return st.integers(0, len(each)).flatmap(lambda count: st.tuples(*each[:count]).map(", ".join))


def applied(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A filter, a method, a global or an operator on values."""

    def each(known: dict[str, str], form: Callable[..., str]) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(known)).flatmap(
            lambda name: st.builds(form, values, st.just(name), given_to(known[name], values))
        )

    filters = each(FILTERS, "({}) | {}({})".format)
    others = st.builds("({}) {} ({})".format, values, st.sampled_from(OPERATORS), values)
    calls = each(CALLS, "{1}({2})".format)
    return st.one_of(*[filters] * 5, each(METHODS, "({}).{}({})".format), calls, others)


expressions = st.recursive(leaf, applied, max_leaves=4)
templates = st.builds(
    lambda around, inner: BEGIN + around.replace("%s", inner), st.sampled_from(AROUND), applied(expressions)
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, bos_token="<s>", eos_token="</s>")
    return found


def ended(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """How rendering ends, in the words for the user; "" where there is a text."""
    tokenizer.chat_template = template
    try:
        chat_template.prompt_of(tokenizer, CHAT)
    except PromptError as error:
        return str(error)
    return ""


@pytest.mark.long(0.5)  # tests/hf/test_chat_template.py has some of each kind
@given(template=templates)
@examples(60)
def test_every_template_ends_within_its_limits(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    before, limits = psutil.Process().memory_info().rss, RENDERER.limits
    RENDERER.limits = replace(limits, cpu_s=0.3)
    try:
        words = ended(tokenizer, template)
        assert not words or not unclear(words, Path("/none")), words
        assert psutil.Process().memory_info().rss - before < SHARE
        tokenizer.chat_template = "{{ messages[0].role }}"
        assert chat_template.prompt_of(tokenizer, CHAT) == "user"
    finally:
        RENDERER.limits = limits


def test_what_jinja_has_is_drawn() -> None:
    assert set(FILTERS) == set(DEFAULT_FILTERS) and set(CALLS) == set(DEFAULT_NAMESPACE)
