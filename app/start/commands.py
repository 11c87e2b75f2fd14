"""The commands of `launch.py`, in the order of its help. Standard library only: read before anything is installed.

A new command takes a line here and a module of its name in `app.cli`, with add_arguments(parser) and run(args) -> exit
code. A module elsewhere is named in MODULES.
"""

COMMANDS = {
    "ui": "Open the dashboard (the default command).",
    "chat": "Talk to a model in this terminal.",
    "batch": "Answer a file of prompts into another file, many at a time; resumable.",
    "import": "Import a model into an expert pack, which opens in seconds and may be larger than memory.",
    "models": "List the models on this machine: packs, the Hugging Face cache, and folders of yours.",
    "calibrate": "Calibrate a model: measure its routing and its times, for predictors and policies that need them.",
    "simulate": "Replay a routing trace through cache policies and sizes, without a model.",
    "plan": "Divide a budget among layers by the waiting it saves, or find the least budget for a speed.",
    "eval": "Measure what lossy settings cost in quality and buy in speed.",
    "bench": "Measure speed side by side with plain transformers, ik_llama.cpp and llama.cpp.",
    "papers": "Print what became of every table and figure of the five papers here; --run asks again.",
    "doctor": "Show what hardware, versions, speeds and free memory Moestro sees.",
    "accept": "Prove Moestro on this machine's GPU, and write one file to send with a bug report.",
    "data": "Show, check, copy or rescue your chats and figures.",
    "settings": "Print the reference of every setting as Markdown.",
    "metrics": "Print the table of metrics as Markdown.",
    "test": "Run the linters, the type checker and the tests. What is not listed below goes to pytest.",
}
MODULES = {name: f"bench.commands.{name}" for name in ("bench", "papers", "accept")}
"""Loaded by name: `app` imports nothing of `bench`, and runs without these commands where that folder is absent."""
ALIASES = {"profile": "calibrate"}  # other words for the same
