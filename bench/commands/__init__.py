"""The commands of `launch.py` that run benches, a module each; `app.cli` loads them by name (`app.start.commands`)."""
