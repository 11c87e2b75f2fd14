"""Native code without a compiler on the machine: LLVM instructions as text, compiled where they run.

ir.py        instructions, loops
numbers.py   numbers of every type as fp32, and back
compile.py   what this CPU can do; functions
"""
