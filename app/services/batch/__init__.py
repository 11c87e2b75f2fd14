"""Many prompts out of a file, answered into another one: by the engine, or by any server of the OpenAI API."""
