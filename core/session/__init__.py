"""A loaded model in use: loading, exclusive access, settings that change while it runs, prompts and sampling."""
