"""Requests as well-known clients send them with their default settings, shortened where they are long.

Written by hand after what the clients publish of themselves, not recorded from running ones; headers are left out.
"""

from __future__ import annotations

from typing import Any

SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The command to execute"},
        "workdir": {"type": "string", "description": "The working directory to execute the command in"},
        "timeout_ms": {"type": "number", "description": "The timeout for the command in milliseconds"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
READ = {
    "type": "object",
    "properties": {"filepath": {"type": "string", "description": "The path of the file to read, relative to the root"}},
    "required": ["filepath"],
}

OPEN_WEBUI_CHAT = {
    "stream": True,
    "model": "demo",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Why do caches work?"},
    ],
    "stream_options": {"include_usage": True},
}
OPEN_WEBUI_TITLE = {
    "model": "demo",
    "messages": [
        {
            "role": "user",
            "content": "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
            '### Output:\nJSON format: { "title": "your concise title here" }\n### Chat History:\n<chat_history>\n'
            "USER: Why do caches work?\nASSISTANT: Because programs repeat themselves.\n</chat_history>",
        }
    ],
    "stream": False,
    "max_completion_tokens": 1000,
}
CLINE = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "You are Cline, a highly skilled software engineer ...\n\n====\n\nTOOL USE"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>\nExplain cache.py\n</task>"},
                {
                    "type": "text",
                    "text": "<environment_details>\n# Open Tabs\ncache.py\n</environment_details>",
                },
            ],
        },
        {
            "role": "assistant",
            "content": "<thinking>I read it first.</thinking>\n<read_file>\n<path>cache.py</path>\n</read_file>",
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "[read_file for 'cache.py'] Result:"},
                {"type": "text", "text": "class Cache: ..."},
            ],
        },
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
CONTINUE_CHAT = {
    "messages": [
        {"role": "system", "content": "<important_rules>\n  You are in chat mode.\n</important_rules>"},
        {"role": "user", "content": [{"type": "text", "text": "Why do caches work?"}]},
    ],
    "model": "demo",
    "max_tokens": 4096,
    "stream": True,
}
CONTINUE_AGENT = {
    **CONTINUE_CHAT,
    "tools": [
        {
            "type": "function",
            "function": {"name": "read_file", "description": "Use this tool to read a file.", "parameters": READ},
        }
    ],
    "parallel_tool_calls": False,
}
CONTINUE_AUTOCOMPLETE = {
    "prompt": "<fim_prefix>def hit_rate(hits, requests):\n    return <fim_suffix>\n<fim_middle>",
    "model": "demo",
    "max_tokens": 256,
    "temperature": 0.01,
    "stop": [
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        "<file_sep>",
        "<|endoftext|>",
        "</fim_middle>",
        "</code>",
        "/src/",
        "#- coding: utf-8",
        "```",
    ],
    "stream": True,
}
LIBRECHAT = {
    "model": "demo",
    "user": "66f1c2d3e4a5b6c7d8e9f0a1",
    "temperature": 0.7,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stop": None,
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": [{"type": "text", "text": "Why do caches work?"}]},
    ],
}
CODEX_CHAT = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "You are Codex, a coding agent running in the Codex CLI ..."},
        {"role": "user", "content": "<environment_context>\n  <cwd>/srv/project</cwd>\n</environment_context>"},
        {"role": "user", "content": "Explain cache.py"},
    ],
    "stream": True,
    "tools": [
        {
            "type": "function",
            "function": {"name": "shell", "description": "Runs a shell command", "strict": False, "parameters": SHELL},
        }
    ],
}
CODEX_RESPONSES = {
    "model": "demo",
    "instructions": "You are Codex, a coding agent running in the Codex CLI ...",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions instructions>...</permissions instructions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "<environment_context>\n  <cwd>/srv</cwd>\n</environment_context>"}
            ],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Explain cache.py"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAAB"},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":["cat","cache.py"],"workdir":"/srv"}',
            "call_id": "call_1",
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": '{"output":"class Cache: ...","metadata":{"exit_code":0,"duration_seconds":0.1}}',
        },
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command", "strict": False, "parameters": SHELL},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch hunk+ end_patch"},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01999999-0000-7000-8000-000000000000",
    "text": {"verbosity": "medium"},
}
CLAUDE_CODE = {
    "model": "demo",
    "max_tokens": 32000,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nAs you answer ...\n</system-reminder>"},
                {"type": "text", "text": "Explain cache.py", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "system": [
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "You are an interactive CLI tool ...", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": READ}],
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "temperature": 1,
    "stream": True,
}

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages?beta=true"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI, chat": (CHAT, OPEN_WEBUI_CHAT),
    "Open WebUI, title": (CHAT, OPEN_WEBUI_TITLE),
    "Cline": (CHAT, CLINE),
    "Continue, chat": (CHAT, CONTINUE_CHAT),
    "Continue, agent": (CHAT, CONTINUE_AGENT),
    "Continue, autocomplete": (TEXT, CONTINUE_AUTOCOMPLETE),
    "LibreChat": (CHAT, LIBRECHAT),
    "Codex, chat": (CHAT, CODEX_CHAT),
    "Codex, responses": (RESPONSES, CODEX_RESPONSES),
    "Claude Code": (MESSAGES, CLAUDE_CODE),
}
