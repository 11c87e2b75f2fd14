"""Native code for CPUs with AVX2, by LLVM: the same on all of them, as wider vectors change no bit and little time."""

import ctypes
import functools
import importlib.util
import logging
import platform
import sys
from collections.abc import Callable
from typing import Any

from core.system.native import kept_code
from core.system.native.ir import Code

log = logging.getLogger("moestro.kernels")

Function = Callable[..., None]
NEEDS = "avx2", "fma", "f16c"
CPU = "x86-64-v3"  # the instruction set level that provides them
WIDTH = 256  # bits of a vector
WINDOWS = ("__chkstk",)  # what kernels call there: it grows the stack of one that takes more than a page of it


@functools.cache
def supported() -> bool:
    """Whether native code can be compiled and run here; where not, the log says so once."""
    reason = ""
    if importlib.util.find_spec("llvmlite") is None:
        reason = "the package llvmlite is not installed"
    else:
        try:
            llvm = _llvm()
            llvm.check_jit_execution()
            features = llvm.get_host_cpu_features()
            if all(features.get(name) for name in NEEDS):
                return True
            reason = "this CPU has no AVX2"
        except Exception as error:  # a broken installation, or a system that forbids generating code
            reason = f"llvmlite cannot compile here ({type(error).__name__}: {error})"
    log.warning(
        "Models are computed on the CPU by torch alone, which is slow, because %s.",
        reason,
    )
    return False


@functools.cache
def processor() -> str:
    """What tells this CPU from others as far as speed goes: its kind, as LLVM knows it."""
    return str(_llvm().get_host_cpu_name()) if supported() else platform.machine()


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if sys.platform == "win32":
        for name in WINDOWS:
            llvm.add_symbol(name, ctypes.cast(getattr(ctypes.WinDLL("ntdll"), name), ctypes.c_void_p).value)
    return llvm


def compiled(*codes: Code) -> dict[str, Function]:
    """The functions by name. They take integers and addresses, run without the GIL, and exist until the process
    ends."""
    llvm = _llvm()
    declared = sorted(set().union(*(code.declared for code in codes)))
    attributes = f'attributes #0 = {{ nounwind "min-legal-vector-width"="{WIDTH}" }}'
    text = "\n".join([*(code.text() for code in codes), *declared, attributes, ""])
    module, target = llvm.parse_assembly(text), llvm.Target.from_default_triple()
    module.verify()
    machine = target.create_target_machine(cpu=CPU, opt=3, jit=True)
    engine = llvm.create_mcjit_compiler(module, machine)
    kept_code.attach(engine, machine.triple, CPU, llvm.llvm_version_info, text)
    engine.finalize_object()
    _engines.append(engine)
    made: dict[str, Function] = {}
    for code in codes:
        address = engine.get_function_address(code.name)
        made[code.name] = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * code.arguments)(address)
    return made


_engines: list[Any] = []  # owners of the machine code


def address(function: Function) -> int:
    """A compiled function's address, for calls from another compiled function."""
    found = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert found is not None
    return found
