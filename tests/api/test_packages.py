"""The packages `openai` and `anthropic`, which many programs are built on, over a real connection."""

from collections.abc import Iterator
from typing import Any

import pytest

from app.server.api import build_app
from app.server.security.access import Access
from tests.api.conftest import saying
from tests.app.conftest import WAIT_S, open_host
from tests.app.served import serving

pytestmark = pytest.mark.long(0.1)  # test_clients.py repeats requests that programs built on them have sent

TOKEN = "a-token_of.this~test"
SAID = '<think>Why not.</think>Let me look.\n<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
HELLO: Any = [{"role": "user", "content": "hello"}]
USED = {"model": "demo", "messages": HELLO}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    host = open_host(tmp_path_factory.mktemp("home"), saying(SAID, takes_tools=True))
    assert host.chats.set_sampling(max_new_tokens=1000) == ""
    with serving(build_app(host, access=Access("127.0.0.1", TOKEN))) as port:
        yield f"http://127.0.0.1:{port}"
    host.close()


@pytest.fixture(scope="module")
def openai() -> Any:
    return pytest.importorskip("openai", reason="the package openai is not installed")


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Imported by the worker that runs these tests alone: it takes a second or two."""
    return pytest.importorskip("anthropic", reason="the package anthropic is not installed")


@pytest.fixture
def openai_client(openai: Any, url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=WAIT_S, max_retries=0)


@pytest.fixture
def anthropic_client(anthropic: Any, url: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key=TOKEN, timeout=WAIT_S, max_retries=0)


def test_openai_s_chat_completions(openai_client: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    whole = openai_client.chat.completions.create(**USED, tools=[tool], logprobs=True, top_logprobs=2)
    [choice] = whole.choices
    assert (choice.message.content, choice.message.reasoning_content) == ("Let me look.\n", "Why not.")
    assert choice.message.tool_calls[0].function.arguments == '{"at": "it"}'
    assert choice.finish_reason == "tool_calls"
    assert choice.logprobs.content[0].token == "<th" and len(choice.logprobs.content[0].top_logprobs) == 2
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert whole.moestro["exact"] is True
    chunks = list(
        openai_client.chat.completions.create(**USED, tools=[tool], stream=True, stream_options={"include_usage": True})
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == "Let me look.\n"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with openai_client.chat.completions.stream(**USED) as stream:
        assert stream.get_final_completion().choices[0].message.content.startswith("Let me look.")


def test_openai_s_completions_and_models(openai_client: Any) -> None:
    assert openai_client.completions.create(model="demo", prompt="x", max_tokens=2).choices[0].text == SAID[:6]
    assert (
        "".join(one.choices[0].text for one in openai_client.completions.create(model="demo", prompt="x", stream=True))
        == SAID
    )
    assert [one.id for one in openai_client.models.list()] == ["demo"]
    assert openai_client.models.retrieve("demo").context_length == 512


def test_openai_s_responses(openai_client: Any) -> None:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}
    whole = openai_client.responses.create(model="demo", input="hello", instructions="Be brief.", tools=[tool])
    assert whole.output_text == "Let me look.\n"
    assert [one.type for one in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.usage.total_tokens > 5
    with openai_client.responses.stream(model="demo", input=HELLO, tools=[tool]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == "Let me look.\n" == stream.get_final_response().output_text


def test_openai_s_errors(openai: Any, openai_client: Any, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(**USED, n=2)
    assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="Embeddings are not served"):
        openai_client.embeddings.create(model="demo", input="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="another one", max_retries=0).models.list()


def test_anthropic_s_messages(anthropic_client: Any) -> None:
    asked: dict[str, Any] = {**USED, "max_tokens": 100, "tools": [{"name": "look", "input_schema": SCHEMA}]}
    whole = anthropic_client.messages.create(**asked, system="Be brief.")
    assert [one.type for one in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[1].text, whole.content[2].input) == ("Let me look.\n", {"at": "it"})
    assert (whole.stop_reason, whole.usage.input_tokens) == ("tool_use", 9)
    with anthropic_client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "Let me look.\n"
        final = stream.get_final_message()
    assert [one.type for one in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"at": "it"}
    assert (final.stop_reason, final.usage.input_tokens) == ("tool_use", 4)
    assert anthropic_client.messages.count_tokens(**USED).input_tokens == 4


def test_anthropic_s_errors(anthropic: Any, anthropic_client: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not loaded here"):
        anthropic_client.messages.create(model="claude", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        anthropic_client.messages.create(**USED, max_tokens=5, tool_choice={"type": "any"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="another", max_retries=0).messages.create(**USED, max_tokens=5)
