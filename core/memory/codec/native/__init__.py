"""Threads that share steps of native code: `team_code.py` is what they run, `threads.py` wakes and ends them."""
