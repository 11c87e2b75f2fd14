"""What is asked through packages that have no command of their own."""

LITELLM = """
import sys

import litellm

url, model = sys.argv[1:]
tools = [{"type": "function", "function": {"name": "look", "description": "Look at a file.", "parameters":
         {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}]
schema = {"name": "dog", "strict": True, "schema": {"type": "object", "properties": {"name": {"type": "string"}},
          "required": ["name"], "additionalProperties": False}}
asked = [{"role": "user", "content": "Why do caches work?"}]
openai = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "no-key", "messages": asked}
for part in litellm.completion(**openai, stream=True, stream_options={"include_usage": True}, max_tokens=50):
    pass
litellm.completion(**openai, tools=tools, tool_choice="required")
litellm.completion(**openai, response_format={"type": "json_schema", "json_schema": schema})
litellm.completion(**openai, tools=tools, response_format={"type": "json_schema", "json_schema": schema})
litellm.completion(model=f"anthropic/{model}", api_base=url, api_key="no-key", messages=asked, tools=tools)
litellm.responses(model=f"openai/{model}", api_base=f"{url}/v1", api_key="no-key", input="Why do caches work?")
"""

OPEN_WEBUI = """
import json, os, socket, subprocess, sys, time, urllib.error, urllib.request

url, model = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
home = os.environ["HOME"]
set_up = {"DATA_DIR": home, "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "WEBUI_AUTH": "False", "ENABLE_OLLAMA_API":
          "False", "OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "no-key", "RAG_EMBEDDING_ENGINE": "openai",
          "WEBUI_SECRET_KEY": "none", "ANONYMIZED_TELEMETRY": "False", "CORS_ALLOW_ORIGIN": "*"}
command = os.path.join(os.path.dirname(sys.executable), "open-webui")
token = ""


def ask(path, body=None):
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request) as reply:
        return reply.read()


server = subprocess.Popen([command, "serve", "--host", "127.0.0.1", "--port", str(port)], env={**os.environ, **set_up})
try:
    while server.poll() is None:
        try:
            ask("/health")
            break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    token = json.loads(ask("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
    ask("/api/models")
    said = [{"role": "user", "content": "Why do caches work?"}]
    ask("/api/chat/completions", {"model": model, "stream": True, "messages": said, "params": {},
                                  "stream_options": {"include_usage": True}})
    told = [*said, {"role": "assistant", "content": "Because programs repeat themselves."}]
    for task in ("title", "tags", "follow_up"):
        ask(f"/api/v1/tasks/{task}/completions", {"model": model, "messages": told, "chat_id": "1"})
finally:
    server.terminate()
    server.wait()
"""

LIBRECHAT = """
import { HumanMessage } from '@langchain/core/messages';
import { Providers, Run } from '@librechat/agents';

const [url, model] = process.argv.slice(2);
const llmConfig = {
  provider: Providers.OPENAI, model, apiKey: 'no-key', streaming: true, streamUsage: true,
  configuration: { baseURL: `${url}/v1` },
};
const graphConfig = { type: 'standard', llmConfig, instructions: 'Be brief.', tools: [] };
const run = await Run.create({ runId: '1', graphConfig, returnContent: true });
const config = { configurable: { thread_id: '1', user_id: 'user' }, streamMode: 'values', version: 'v2' };
await run.processStream({ messages: [new HumanMessage('Why do caches work?')] }, config);
"""

AI_SDK = """
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, streamText, tool } from 'ai';

const [url, model] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: 'moestro', baseURL: `${url}/v1`, apiKey: 'no-key' });
const prompt = 'Why do caches work?';
const at = { enum: ['cache.py', 'disk.py'] };
const inputSchema = jsonSchema({ type: 'object', properties: { at }, required: ['at'] });
const tools = { look: tool({ description: 'Look at a file.', inputSchema }) };
const { textStream } = streamText({ model: provider(model), system: 'Be brief.', prompt });
for await (const part of textStream) process.stdout.write(part);
for (const toolChoice of ['required', { type: 'tool', toolName: 'look' }]) {
  const { toolCalls } = await generateText({ model: provider(model), prompt, tools, toolChoice });
  console.log(toolCalls.map(({ toolName, input }) => `${toolName}(${input.at})`));
}
"""
