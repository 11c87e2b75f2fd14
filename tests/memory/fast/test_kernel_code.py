"""What is compiled needs no library, but on Windows what grows the stack, which a load names to LLVM."""

import ctypes
import re
import struct
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from core.memory.codec.base import Base
from core.memory.codec.fast import dequantize, products
from core.memory.codec.matrix import Matrix, matrix
from core.memory.codec.native.team_code import functions
from core.system.native import compile
from core.system.native.compile import supported
from tests.memory.test_codec import make
from tests.selection import layered

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
SYSTEMS = {"x86_64-unknown-linux-gnu": set[str](), "x86_64-pc-windows-msvc-elf": {*compile.WINDOWS}}


class Read(Exception):
    """LLVM was given instructions."""


def instructions(compiled: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    def read(text: str) -> None:
        raise Read(text)

    with monkeypatch.context() as patched:
        patched.setattr(compile._llvm(), "parse_assembly", read)
        with pytest.raises(Read) as given:
            compiled()
    return str(given.value)


def wanted(file: bytes) -> set[str]:
    """The symbols that an ELF file for a 64-bit machine expects from elsewhere."""
    start, size, count = *struct.unpack_from("<Q", file, 40), *struct.unpack_from("<HH", file, 58)
    sections = [struct.unpack_from("<IIQQQQII", file, start + size * i) for i in range(count)]
    symbols = next(section for section in sections if section[1] == 2)
    names = sections[symbols[6]][4]
    found = [struct.unpack_from("<IBBH", file, symbols[4] + at) for at in range(24, symbols[5], 24)]
    return {file[names + name :].split(b"\0", 1)[0].decode() for name, _, _, defined in found if not defined}


def of(name: str) -> Matrix:
    codec = make(name, {"down_proj": torch.empty(16, 192)})
    assert isinstance(codec, Base)
    return matrix(codec, "down_proj")


KINDS: dict[str, tuple[Callable[[], object], bool]] = {
    "team": (functions.__wrapped__, True),
    "prepared": (lambda: products._prepare.__wrapped__(of("int8"), torch.float16), False),
    **{
        f"{name} {what}": (lambda name=name, make=make: make(name), calls)  # type: ignore[misc]
        for name in ("checkpoint", "int8", "nf4", "mxfp4", "nvfp4", "int3")
        for what, calls, make in (
            ("multiplied", True, lambda name: products._multiply.__wrapped__(of(name), torch.float16)),
            ("dequantised", False, lambda name: dequantize._kernel.__wrapped__(of(name), torch.float16)),
        )
        if (name, what) != ("checkpoint", "dequantised")
    },
}


@pytest.mark.parametrize("kind", layered(KINDS, quick=lambda kind: kind in ("team", "int8 multiplied")))
def test_kernels_need_nothing_of_any_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llvm, (compiled, calls) = compile._llvm(), KINDS[kind]
    module = llvm.parse_assembly(instructions(compiled, monkeypatch))
    own = {function.name for function in module.functions}
    for system, known in SYSTEMS.items():
        machine = llvm.Target.from_triple(system).create_target_machine(cpu=compile.CPU, opt=3, jit=True)
        module.triple, module.data_layout = system, str(machine.target_data)
        assert wanted(machine.emit_object(module)) <= known, system
        named = re.findall(r"^\s+(?:call|jmp)q?\s+([^.\s*%]\w*)\s*$", machine.emit_assembly(module), re.MULTILINE)
        assert {*named} <= own | known and (calls or not named)


def test_on_windows_the_system_s_own_function_grows_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is played: LLVM is given what ntdll has under that name."""
    function, asked = ctypes.CFUNCTYPE(None)(lambda: None), list[str]()

    def library(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(**dict.fromkeys(compile.WINDOWS, function))

    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", library, raising=False)
    llvm = compile._llvm.__wrapped__()
    wanted = ctypes.cast(function, ctypes.c_void_p).value
    assert asked == ["ntdll"] and [llvm.address_of_symbol(name) for name in compile.WINDOWS] == [wanted]
