"""Native code for this CPU, by LLVM: detects its vector widths and compiles functions for it."""

import ctypes
import functools
import importlib.util
import logging
import os
import platform
from collections.abc import Callable
from typing import Any

from core.system.native import kept_code
from core.system.native.ir import Code

log = logging.getLogger("moestro.kernels")

Function = Callable[..., None]
NEEDS = {64: ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"), 32: ("avx2", "fma", "f16c")}
PAIRS = "+avx512bf16"  # the feature of such a CPU
CPUS = {64: "x86-64-v4", 32: "x86-64-v3"}  # by vector bytes: the instruction set level that provides them


@functools.cache
def widths() -> tuple[int, ...]:
    """Vector widths in bytes that kernels can be compiled for here, widest first; () = none (logged once). Where
    ATEN_CPU_CAPABILITY keeps torch to AVX2, so it does them."""
    reason = ""
    if importlib.util.find_spec("llvmlite") is None:
        reason = "the package llvmlite is not installed"
    else:
        try:
            llvm = _llvm()
            llvm.check_jit_execution()
            features = llvm.get_host_cpu_features()
            most = 32 if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() == "avx2" else 64
            found = tuple(w for w, needed in NEEDS.items() if w <= most and all(features.get(name) for name in needed))
            if found:
                return found
            reason = "this CPU has no AVX2"
        except Exception as error:  # a broken installation, or a system that forbids generating code
            reason = f"llvmlite cannot compile here ({type(error).__name__}: {error})"
    log.warning(
        "Experts in quantized formats are computed on the CPU by dequantising them each time, which is slow, "
        "because %s.",
        reason,
    )
    return ()


@functools.cache
def multiplies_pairs() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 numbers into sums of fp32."""
    return widths()[:1] == (64,) and bool(_llvm().get_host_cpu_features().get(PAIRS[1:]))


@functools.cache
def processor() -> str:
    """What tells this CPU from others as far as speed goes: its kind, as LLVM knows it, and the vectors used."""
    return f"{_llvm().get_host_cpu_name()} {widths()}" if widths() else platform.machine()


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def compiled(*codes: Code, width: int, features: str = "") -> dict[str, Function]:
    """The functions by name, compiled for vectors of `width` bytes, and for `features` that not every such CPU has.
    They take integers and addresses, run without the GIL, and exist until the process ends."""
    llvm = _llvm()
    declared = sorted(set().union(*(code.declared for code in codes)))
    attributes = f'attributes #0 = {{ nounwind "min-legal-vector-width"="{width * 8}" }}'
    text = "\n".join([*(code.text() for code in codes), *declared, attributes, ""])
    module, target = llvm.parse_assembly(text), llvm.Target.from_default_triple()
    module.verify()
    machine = target.create_target_machine(cpu=CPUS[width], features=features, opt=3, jit=True)
    engine = llvm.create_mcjit_compiler(module, machine)
    kept_code.attach(engine, machine.triple, CPUS[width], features, llvm.llvm_version_info, text)
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
