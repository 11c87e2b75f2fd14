"""Chat templates of the shapes that models come with, and chats for them: what the worker writes has to be what
`apply_chat_template` writes."""

from typing import Any

from demo.tokenizer import CHAT_TEMPLATE
from tests.tiny_tokenizer import TEMPLATE

LONG = """
{#- An assistant that calls tools and thinks: every part of it is one that models' templates have. -#}
{%- macro described(tool, depth=0) %}
    {{- '  ' * depth + '- ' + tool.name + ': ' + (tool.description | default('no description', true) | trim) }}
    {%- for name, field in (tool.parameters.properties | default({})).items() %}
        {%- set kind = field.type if field.type is string else field.type | join('|') %}
        {{- '\\n' + '  ' * (depth + 1) + name + ' (' + kind }}
        {{- ', required)' if name in (tool.parameters.required | default([])) else ')' }}
        {%- if field.enum is defined %}{{- ' one of ' + field.enum | tojson }}{%- endif %}
        {%- if field.items is mapping %}{{- ' of ' + field['items'] | tojson(indent=2) }}{%- endif %}
    {%- endfor %}
{%- endmacro %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- set state = namespace(system='', last_user=-1, tool_open=false, seen=[]) %}
{%- if messages[0].role == 'system' %}
    {%- if messages[0].content is string %}{%- set state.system = messages[0].content | trim %}
    {%- else %}
        {%- set texts = messages[0].content | selectattr('type', 'equalto', 'text') %}
        {%- set state.system = texts | map(attribute='text') | join('\\n') %}
    {%- endif %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if message.role == 'user' and not (message.content is string and message.content.startswith('<result>')) %}
        {%- set state.last_user = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}<|start|>system
Today is {{ date_string }}.
{%- if state.system %}

{{ state.system }}
{%- endif %}
{%- if tools %}

# Tools

You may call these:
{%- for tool in tools %}
{{ described(tool.function if tool.function is defined else tool) }}
{%- endfor %}

Answer with <call>{"name": ..., "arguments": ...}</call>.
{%- endif %}
{%- if documents %}
{%- for document in documents %}

[{{ loop.index }}/{{ loop.length }}] {{ document.title | upper }}
{{ document.text | indent(2, first=true) }}
{%- endfor %}
{%- endif %}
<|end|>
{%- for message in messages %}
    {%- if message.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- elif message.role == 'user' %}
        {{- '\\n<|start|>user\\n' }}
        {%- if message.content is string %}{{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == 'image' %}{{- '<|image|>' }}{%- continue %}{%- endif %}
                {{- part.text }}
            {%- endfor %}
        {%- endif %}
        {{- '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content | default('', true) %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '\\n<|start|>assistant\\n' }}
        {%- if loop.index0 > state.last_user and thought %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- content }}{{- '<|end|>' }}{%- endgeneration %}
        {%- for call in message.tool_calls | default([]) %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<call>{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</call>' }}
            {%- set state.seen = state.seen + [call.name] %}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '\\n<|start|>user\\n' if not state.tool_open else '\\n' }}
        {%- set state.tool_open = true %}
        {{- '<result>' + (message.content if message.content is string else message.content | tojson) + '</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|end|>' }}
            {%- set state.tool_open = false %}
        {%- endif %}
    {%- else %}{{- raise_exception('Unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

SHAPES: dict[str, Any] = {
    "tests": TEMPLATE,
    "demo": CHAT_TEMPLATE,
    "long": LONG,
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ pad_token }}",
    "raises": "{% if messages | length > 1 %}{{ raise_exception('only one, not ' ~ messages | length) }}{% endif %}one",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=4) }}"
    "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}",
    "plain tojson keeps HTML": "{{ '<a href=\"x\">&amp;</a>' | tojson }}{{ 'é' | tojson(ensure_ascii=true) }}",
    "documents": "{% for d in documents or [] %}{{ d.title }}={{ d.text }};{% endfor %}{{ documents is none }}",
    "year": "{{ strftime_now('%Y') }}",
    "blocks": "{% for m in messages %}\n    {% if true %}\n  x\n    {% endif %}\n{% endfor %}\n\n end \n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index0 == 3 %}{% break %}{% elif loop.first %}{% continue %}{% endif %}"
    "{{ loop.cycle('a', 'b') }}{{ m.role }}{% else %}none{% endfor %}",
    "macros": "{% macro f(x, y='-') %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}"
    "{% call f(1) %}in{% endcall %}{{ f(2, y=3) }}",
    "namespace": "{% set n = namespace(i=0, last='') %}{% for m in messages %}{% set n.i = n.i + 1 %}"
    "{% set n.last = m.content %}{% endfor %}{{ n.i }}{{ n.last }}",
    "dict": "{% set d = dict(a=1, **{'b': [1, (2, 3)]}) %}{{ d }}{{ d.items() | list }}{{ dict.fromkeys('ab', 0) }}",
    "sets": "{% set block %}a{{ messages | length }}{% endset %}{{ block | upper }}{% set a, b = 1, 2 %}{{ a + b }}",
    "filters": "{{ messages | map(attribute='role') | unique | sort | join(',') }}"
    "{{ messages | groupby('role') | length }}{{ messages | selectattr('role', 'in', ['user']) | list | length }}"
    "{{ 'a b' | title | center(9) | replace(' ', '_') }}",
    "text": "{{ messages[-1].content[:3] }}{{ messages[0]['content'][::-1] }}{{ messages[-1].content.split()[-1] }}"
    "{{ '%05.1f|%s' % (2.25, 'x') }}",
    "folded": "{{ 'ab' * 3 ~ (2 ** 10) }}{{ [1, 2][1] }}{{ 7 // 2 }}{{ 'x' if 1 < 2 < 3 else 'y' }}",
    "escaped": "{{ '<b>' | escape }}{{ '<i>' | e }}{{ '<u>' | safe }}{% filter upper %}{{ '<s>' }}{% endfilter %}",
    "unknown names": "[{{ nothing }}]{{ nothing is defined }}{{ enable_thinking | default('unset') }}"
    "{{ messages[0].nothing }}",
    "none is left out": "{% for m in messages %}{{ 'name' in m }}{{ m.content is defined }}{% endfor %}",
    "line breaks": "a\r\nb\n\n{{ 'c\\n' }}\n",
    "unicode": "{{ '🦫' ~ messages[0].content | length }}\u2028{{ 'ß' | upper }}\udcff",
    "numbers": "{{ 1e400 }} {{ -0.0 }} {{ 2**70 }} {{ 0.1 + 0.2 }} {{ 10**15 | float }} {{ true }} {{ none }}",
    "two": {"default": "d{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": "t{{ tools | length }}"},
    "two without a default": {"other": "x"},
    "no template": 5,
    "rejects system": "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m.role }}{% endfor %}",
    "undefined call": "{{ nothing() }}",
    "divides": "{{ 1 // 0 }}",
    "does not parse": "{% for m in messages %}",
    "unsafe": "{{ messages.__class__.__mro__ }}",
    "changes a list": "{{ messages.append(1) }}",
    "includes": "{% include 'another.jinja' %}",
}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": " Looks a word up. ",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "enum": ["a", "é"]},
                "where": {"type": ["string", "null"]},
                "among": {"type": "array", "items": {"type": "integer", "minimum": 1.5}},
            },
            "required": ["word"],
        },
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"word": "é", "n": [1, None, 2.5]}}}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <there> & you 🦫 é"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nBecause.", "name": None},
        {"role": "user", "content": "And \ud83d?\r\n\u2028\x00"},
    ],
    "tools": [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "reasoning": "I should look."},
        {"role": "tool", "content": "seen", "tool_call_id": "1"},
        {"role": "tool", "content": '{"a": "b"}', "tool_call_id": "1"},
        {"role": "assistant", "content": "It is there."},
    ],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    ],
}


def conversation(messages: int) -> list[dict[str, Any]]:
    said = {"user": "How does a cache decide which expert it evicts? ", "assistant": "It evicts the one of least use. "}
    return [
        {"role": role, "content": f"{number}: " + said[role] * (2 if role == "user" else 30)}
        for number, role in ((n, ("user", "assistant")[n % 2]) for n in range(messages))
    ]
