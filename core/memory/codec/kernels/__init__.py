"""Triton kernels that multiply directly from slots on a GPU, several experts per launch.

    gemv.py      states times matrices: decode, and prefill of few tokens
    dequantize.py  dequantises matrices: longer prompts, multiplied by torch
    blocks.py    tile sizes of a program
    products.py  calls the kernels: fields of a codec's slots, launches, scratch memory
    build.py     compiles them in this process, without a C compiler
    driver.py    launches them through the CUDA driver: in half of the time of Triton's own launcher, and without a
                 C compiler
    check.py     compiles all of them for GPUs that need not be there

Where the kernels are unavailable, the codec's own `linear` computes, and one log message says so.
"""

import functools
import importlib.util
import logging
import os
import platform
import shutil
import sysconfig
from pathlib import Path

import torch

from core.memory.codec.base import Base, Codec
from core.memory.codec.kernels.driver import driver_launcher
from core.memory.codec.kernels.products import LANES_MOST, ByTriton, Launcher, SlotKernels, portable, scratch_bytes
from core.memory.cuda_driver import DriverError

__all__ = [
    "LANES_MOST",
    "ByTriton",
    "Launcher",
    "SlotKernels",
    "available",
    "driver_launcher",
    "lacking",
    "launched_by",
    "launcher_of",
    "make_kernels",
    "notice",
    "portable",
    "say_unavailable",
    "scratch_bytes",
    "why_not",
]

log = logging.getLogger("moestro.kernels")

INSTALL = "On Debian and Ubuntu: apt install gcc python3-dev."


def why_not(device: torch.device) -> str:
    """Why the kernels cannot run on a device; "" when they can be tried.

    On a CPU they run only under Triton's interpreter (TRITON_INTERPRET=1), which is for tests. On a GPU they never run
    under it, because it copies the arguments it knows to the CPU and would not find the slots there.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type == "cpu" and not interpreted:
        return "there is no GPU"
    if device.type not in ("cpu", "cuda"):
        return f"they are not written for {device.type}"
    if device.type == "cuda" and interpreted:
        return "TRITON_INTERPRET is set"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (on Windows: triton-windows)"
    return ""


def available(device: torch.device) -> bool:
    """Whether the kernels can be tried on a device."""
    return not why_not(device)


def lacking() -> str:
    """What Triton's own launcher needs besides Triton, and does not find here; "" = nothing. On Windows its package
    brings a compiler along."""
    if platform.system() == "Windows":
        return ""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks for headers
    lacks = []
    if not compiler or shutil.which(compiler.split()[0]) is None:
        lacks.append("a C compiler")
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").is_file():
        lacks.append("Python's headers")
    return " and ".join(lacks)


def launched_by(device: torch.device) -> str:
    """What launches the kernels on a GPU, and why, where they can be tried."""
    refused = driver_refuses(device)
    return f"Triton, as the CUDA driver does not ({refused})" if refused else "the CUDA driver"


def driver_refuses(device: torch.device) -> str:
    """Why kernels are not launched through the CUDA driver; "" where they are."""
    if torch.version.hip is not None:
        return "it is AMD's"
    try:
        driver_launcher(device)
    except DriverError as error:
        return str(error)
    return ""


def notice(device: torch.device) -> str:
    """What the user should know of a GPU that computes without the kernels; "" where nothing stands in their way."""
    if device.type != "cuda":
        return ""
    if reason := why_not(device):
        return f"Experts are computed one at a time on this GPU, more slowly, because {reason}."
    if (refused := driver_refuses(device)) and (lacks := lacking()):
        return (
            f"The CUDA driver cannot start the GPU's kernels ({refused}), and Triton needs {lacks} to take its place: "
            f"experts are computed one at a time, more slowly. {INSTALL}"
        )
    return ""


def launcher_of(device: torch.device) -> Launcher:
    """The driver's; Triton's where that refuses, if Triton finds what it needs. Raises DriverError."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ByTriton
    try:
        return driver_launcher(device)
    except DriverError:
        if lacking():
            raise
        return ByTriton


def make_kernels(codec: Codec) -> SlotKernels | None:
    """Kernels for a codec's slots; None where they cannot run (logged once for a GPU)."""
    reason = why_not(codec.device)
    if not reason and isinstance(codec, Base):
        try:
            return SlotKernels(codec, launcher_of(codec.device))
        except DriverError as error:
            reason = f"the CUDA driver cannot start them ({error}), and Triton's own launcher needs {lacking()}"
        except Exception as error:  # a broken installation of triton can raise anything
            reason = f"triton cannot be loaded ({error})"
    if codec.device.type == "cuda":
        say_unavailable(reason)
    return None


@functools.cache
def say_unavailable(reason: str) -> None:
    """Log once that experts are computed without the kernels."""
    lacks = "" if why_not(torch.device("cuda")) else lacking()
    log.warning(
        "Experts are computed one at a time, more slowly: the grouped GPU kernels are not used, because %s.%s",
        reason,
        f" Triton does not find {lacks} here, with which it would launch them itself. {INSTALL}" if lacks else "",
    )
