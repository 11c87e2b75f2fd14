"""The API for other programs under /v1: OpenAI's chat completions, completions, responses and models, and Anthropic's
messages."""
