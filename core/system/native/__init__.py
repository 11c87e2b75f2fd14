"""Native code without a compiler on the machine: LLVM instructions as text, compiled at run time.

ir.py        instructions, loops
numbers.py   conversion of every number type to and from fp32
compile.py   CPU features; compiled functions
"""
