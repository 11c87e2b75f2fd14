"""The packages that a command needs, and the `.venv` next to launch.py that they go into. Standard library only.

Only the requirements are installed, not the project: it runs from the checkout, so nothing but `.venv` is written in
the tree, and what is edited is what runs. A wheel's requirements came with it, and there nothing is made or installed.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib import invalidate_caches, metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
UNFINISHED = VENV / ".unfinished"  # there while an installation runs: an interrupted one is taken up again
INSTALLED = any(ROOT.parent.glob("moestro-*.dist-info"))  # which an installer leaves next to the folder of a wheel
WINDOWS = os.name == "nt"
API = ("fastapi", "starlette", "anyio", "pydantic")  # whose forms a batch reads
PAGE = ("gradio", "uvicorn", "plotly", "pandas")
NO_MODEL = (*API, *PAGE, "llvmlite", "llguidance")
UNUSED = {"ui": (), "test": (), **dict.fromkeys(("import", "models"), NO_MODEL)}  # needed by none of these
SPARE = (*NO_MODEL, "gguf")  # ... nor by any other, but that
UNUSED["batch"] = tuple(name for name in SPARE if name not in API)
RUNS_TESTS = ("pytest", "pytest-timeout")  # what `accept` needs beside that, and leaves its tests out without
UV = "uv>=0.7,<1"
NO_VENV = (
    "This Python cannot make virtual environments. Add what is missing (on Debian and Ubuntu: apt install "
    "python3-venv), then run the same command again."
)


def requirements(command: str) -> list[str]:
    """What pyproject.toml declares for a command, as pip reads it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = project["optional-dependencies"]["test"] if command in ("test", "accept") else []
    if command == "accept":
        tests = [requirement for requirement in tests if name_of(requirement) in RUNS_TESTS]
    found = [*project["dependencies"], *tests]
    system = platform.system()  # the only kind of marker there is: ; platform_system == 'Linux'
    return [name for name, _, marker in (r.partition(";") for r in found) if not marker or f"'{system}'" in marker]


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def installed(name: str) -> str:
    """The version of a distribution in this Python; "" when it is absent or was left half installed."""
    try:
        return metadata.version(name) or ""
    except (metadata.PackageNotFoundError, KeyError):
        return ""


def fits(version: str, requirement: str) -> bool:
    """Is a version within the >= and < bounds of a requirement? Its leading numbers alone are compared."""

    def numbers(text: str) -> list[int]:
        found = [int(n) for n in re.split(r"[^\d.]", text, maxsplit=1)[0].split(".") if n]
        return found + [0] * (6 - len(found))

    bounds = re.findall(r"(>=|<)\s*([\d.]+)", requirement)
    return bool(version) and all((numbers(version) >= numbers(bound)) == (sign == ">=") for sign, bound in bounds)


def missing(command: str) -> list[str]:
    """The requirements of a command that this Python does not meet, and that it cannot do without."""
    unused = UNUSED.get(command, (*SPARE, *RUNS_TESTS))
    return [r for r in requirements(command) if name_of(r) not in unused and not fits(installed(name_of(r)), r)]


@cache
def provide_tests() -> list[str]:
    """Install what `accept` runs tests with, where this is the Python of `.venv`; returns what is missing then."""

    def lacking() -> list[str]:
        return [r for r in requirements("accept") if name_of(r) in RUNS_TESTS and not fits(installed(name_of(r)), r)]

    if lacking() and Path(sys.prefix).resolve() == VENV.resolve():
        pip(*lacking())
        invalidate_caches()
    return lacking()


def venv_python() -> Path:
    return VENV / ("Scripts/python.exe" if WINDOWS else "bin/python")


def works(code: str) -> bool:
    """Does the Python of `.venv` start, and run this line?"""
    try:
        return subprocess.run([str(venv_python()), "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def debian(*packages: str) -> bool:
    """Install packages of Debian or its kin, where this is root and apt works."""
    if WINDOWS or os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    print(f"Installing {' and '.join(packages)} with apt", flush=True)
    apt = ["apt-get", "-qq", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run([*apt, *step], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"apt could not install them: {(done.stderr.strip().splitlines() or ['no reason was given'])[-1]}")
    return done.returncode == 0


def enter_venv(arguments: list[str]) -> int:
    """Run this file again in `.venv`, which is made, or repaired when its Python or its pip does not work."""
    if not works("import pip"):
        print(f"Making a virtual environment in {VENV}", flush=True)
        if not find_spec("ensurepip"):  # which Debian keeps apart from Python
            debian("python3-venv")
            invalidate_caches()
        for afresh in ([], ["--clear"]):  # what is there is kept if it can be mended
            if find_spec("ensurepip") and not works("import pip"):
                subprocess.call([sys.executable, "-m", "venv", *afresh, str(VENV)])
        if not works("import pip"):
            print(NO_VENV, file=sys.stderr)
            return 1
    return hand_over([str(venv_python()), str(ROOT / "launch.py"), *arguments])


def hand_over(command: list[str]) -> int:
    """Become this command; on Windows, which cannot, wait for it. Ctrl-C reaches it either way."""
    if not WINDOWS:
        os.execv(command[0], command)
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the inner one got it too, and decides how to end


def pip(*wanted: str) -> bool:
    """Install into this Python."""
    return subprocess.call([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *wanted]) == 0


def uv(*wanted: str) -> bool:
    """Install into this Python with uv, which picks the build of torch that the GPU's driver can run."""
    into = ["--python", sys.executable, "--torch-backend=auto"]
    return pip(UV) and subprocess.call([sys.executable, "-m", "uv", "pip", "install", *into, *wanted]) == 0


def install(command: str) -> bool:
    """Fill the `.venv` this runs in. Where that leaves a GPU unused, print why and what to do."""
    print("Installing what Moestro needs into .venv. This happens once and can take some minutes.", flush=True)
    UNFINISHED.touch()
    wanted, gpu = requirements(command), shutil.which("nvidia-smi")
    done = bool(gpu) and uv(*wanted)
    if not done and gpu and WINDOWS:  # pip alone would bring a torch that cannot use the GPU
        return False
    if not done and not pip(*wanted):
        return False
    UNFINISHED.unlink()
    if missing(command):
        return False
    if gpu:
        print(unused_gpu(), end="", flush=True)
    return True


def unused_gpu() -> str:
    """Why the installed torch computes on the CPU of a machine that has a GPU, as a line; "" where it does not."""
    invalidate_caches()
    from core.capacity.device import passed_over

    why = passed_over("auto")
    return f"{why}\n" if why else ""


def replace_torch() -> bool:
    """Install the build of torch that this machine's GPU can run in place of the one that is there, which this process
    must not have imported: Windows would not let go of its files."""
    (torch,) = (wanted for wanted in requirements("ui") if name_of(wanted) == "torch")
    return uv("--reinstall-package", "torch", torch)
