"""A loaded model in use: loading it, who may use it, settings that change while it runs, prompts and sampling."""
