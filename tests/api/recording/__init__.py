"""Records what programs that use the API really send: each is run against a server with canned answers.

`python -m tests.api.recording --help`; which programs there are and how to install them is in `clients.py`. The
recordings in tests/api/recordings are what `tests/api/test_clients.py` sends to Moestro.
"""
