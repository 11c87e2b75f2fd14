"""The running dashboard from outside: its server in a process of its own, and its page without a browser."""
