"""A chat as the model's template writes it, and how long one may be, by characters, before it is tokenised."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.engine.length import UNBOUNDED, TextLimit
from core.engine.prompt import Prompt
from core.errors import ContextError, PromptError
from core.types import Chat
from tests.selection import examples
from tests.tiny_tokenizer import TEMPLATE, save_tokenizer

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + TEMPLATE
CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.at }}){% endfor %};{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def prompt(folder: Path, template: str | None) -> Prompt:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return Prompt(tokenizer, SimpleNamespace(eos_token_id=None))


def test_tools_reach_a_template_that_takes_them(folder: Path) -> None:
    with_tools = prompt(folder, WITH_TOOLS)
    assert with_tools.takes_tools
    assert with_tools.text(Chat(HELLO, (TOOL,))) == "[look]u:hello\na:"
    assert with_tools.text(Chat(HELLO)) == with_tools.text(HELLO) == "u:hello\na:"
    for without in (TEMPLATE, None, "{{ raise_exception('no') }}", "{{ nothing.at.all }}"):
        assert not prompt(folder, without).takes_tools


def test_a_prompt_that_is_too_long_is_told_by_us_alone(folder: Path) -> None:
    """transformers' own warning of indexing errors, which nobody will see, is not printed."""
    long, said = prompt(folder, TEMPLATE), list[logging.LogRecord]()
    long.tokenizer.model_max_length = 8
    log, handler = logging.getLogger("transformers"), logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(ContextError, match="the context holds 16"):
            long.encode("a text of more than sixteen bytes", 16)
    finally:
        log.removeHandler(handler)
    assert not said


def test_calls_of_earlier_answers_reach_the_template(folder: Path) -> None:
    call = {"type": "function", "id": "", "function": {"name": "look", "arguments": {"at": "it"}}}
    chat = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "seen"}]
    assert prompt(folder, CALLS).text(chat) == "user:hello;assistant:look(it);tool:seen;"


@pytest.mark.parametrize(
    ("end", "opens"), [("<think>", True), ("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_template_may_begin_the_reasoning(folder: Path, end: str, opens: bool) -> None:
    template = TEMPLATE + "{% if add_generation_prompt %}" + end.replace("\n", "{{ '\\n' }}") + "{% endif %}"
    assert prompt(folder, template).opens_reasoning is opens


def test_a_chat_that_the_template_refuses_is_the_asker_s_fault(folder: Path) -> None:
    with pytest.raises(PromptError, match="roles must alternate"):
        prompt(folder, "{{ raise_exception('roles must alternate') }}").text(HELLO)


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = {c: i for i, c in enumerate(ALPHABET)}
FALLBACK = {**{f"<0x{b:02X}>": b for b in range(256)}, "▁": 256, "a": 257, "▁a": 258, "▁▁": 259}
AB = [("a", "b")]


def bytewise(normalizer: object = None) -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={**BYTES, "ab": 256, "ĠĠ": 257}, merges=[*AB, ("Ġ", "Ġ")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def pieces() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab=FALLBACK, merges=[("▁", "a"), ("▁", "▁")], byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def eats_spaces() -> Tokenizer:
    made = bytewise()
    made.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return made


def shortens() -> Tokenizer:
    return bytewise(normalizers.Replace("abcd", "a"))


MAKERS = {
    "bytes": bytewise,
    "NFC": lambda: bytewise(normalizers.NFC()),
    "pieces": pieces,
    "words": words,
    "eats spaces": eats_spaces,
    "shortens": shortens,
    "strips": lambda: bytewise(normalizers.Strip()),
    "drops": lambda: bytewise(normalizers.StripAccents()),
    "unigram": lambda: Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
}


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("bytes", TextLimit(2)),
        ("NFC", TextLimit(8)),
        ("pieces", TextLimit(6)),
        ("words", TextLimit(UNBOUNDED)),
        ("eats spaces", TextLimit(7, skips_spaces=True)),
        ("shortens", TextLimit(8)),
        ("strips", TextLimit(2, skips_spaces=True)),
        ("drops", TextLimit(UNBOUNDED)),
        ("unigram", TextLimit(UNBOUNDED)),
    ],
)
def test_the_limit_follows_from_the_pipeline(name: str, limit: TextLimit) -> None:
    assert TextLimit.of(wrap(MAKERS[name]())) == limit


def test_bytes_that_have_no_token_may_be_left_out() -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert TextLimit.of(wrap(made)) == TextLimit(UNBOUNDED)


KINDS = {name: (wrap(make()), TextLimit.of(wrap(make()))) for name, make in MAKERS.items()}


@pytest.mark.parametrize("name", KINDS)
@examples(100, fewer=3)
@given(
    text=st.text(alphabet="abcd \n\u0301ᾂé☃1", max_size=60)
    | st.text(max_size=30)
    | st.sampled_from(
        ["ab" * 40, "abcd" * 30, " " * 90, "\u03b1\u0313\u0300\u0345" * 20, "<|end|>" + " " * 99, "☃" * 80]
    )
)
def test_what_fits_in_the_context_is_never_refused(name: str, text: str) -> None:
    tokenizer, limit = KINDS[name]
    limit.check(text, len(tokenizer(text, add_special_tokens=False).input_ids) or 1)


def test_a_huge_text_is_refused_before_it_is_tokenised(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(tmp_path))
    prompt = Prompt(tokenizer, type("Config", (), {"eos_token_id": None}))
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", lambda *_, **__: pytest.fail("it was tokenised"))
    huge = [{"role": "user", "content": "x" * 5_000_000}]
    for refuse in (lambda: prompt.encode(huge, 512), lambda: prompt.check(huge, 512)):
        with pytest.raises(ContextError, match=r"5,000,0\d\d characters, more than any 512 tokens .*longer context"):
            refuse()
