"""Many prompts out of a file, answered into another one."""
