"""The canonical product on a GPU, in Triton: the bits of `core.memory.codec.fast`, which describes the order.

    form.py      what a kernel has to know of a matrix, as one compile-time constant
    integers.py  four 8-bit integers at once, and entries of tables: NVIDIA's instructions, or equal expressions
    floats.py    numbers of a slot, the tree over eight sums, rounding to a number type
    prepare.py   rounds rows of x to 8-bit integers
    codes.py     rows of codes times prepared rows of x
    plain.py     rows of plain numbers times rows of x
    product.py   the kernel of one product, for the rows of several experts
    tiles.py     the same for many rows of x, by codes, with tensor cores
    launch.py    calls the kernels
    joined.py    the kernel of several dense matrices by the same rows
    dense.py     calls it

A thread has the sums of one accumulator of some rows, so that before the tree only sums of integers cross threads,
which are the same in any order. Nothing is contracted (`enable_fp_fusion` is off): each fma is written.
"""
