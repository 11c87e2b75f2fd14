"""Ends a process together with what it started, on any system."""

import subprocess
from typing import Any

import psutil


def end_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process, if it runs, and its descendants; returns when it has ended."""
    if process.poll() is None:
        started = []
        try:
            started = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            pass  # it has just ended
        process.kill()
        for one in started:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                pass
        process.wait()
