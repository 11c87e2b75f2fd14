"""What is asked through packages that have no command of their own."""

LITELLM = '''
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
litellm.completion(model=f"anthropic/{model}", api_base=url, api_key="no-key", messages=asked, tools=tools)
litellm.responses(model=f"openai/{model}", api_base=f"{url}/v1", api_key="no-key", input="Why do caches work?")
'''

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
const inputSchema = jsonSchema({ type: 'object', properties: { at: { type: 'string' } }, required: ['at'] });
const tools = { look: tool({ description: 'Look at a file.', inputSchema }) };
const { textStream } = streamText({ model: provider(model), system: 'Be brief.', prompt });
for await (const part of textStream);
await generateText({ model: provider(model), prompt, tools, toolChoice: 'required' });
await generateText({ model: provider(model), prompt, tools, toolChoice: { type: 'tool', toolName: 'look' } });
"""
