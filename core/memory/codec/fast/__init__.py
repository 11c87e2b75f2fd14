"""The canonical product: y = W x as one function of the stored weights and one row of x, whatever computes it.

    layout.py    what codes mean as 8-bit integers, and the order in which a row of x is stored for them
    states.py    rounds a row of x to 8-bit integers, one scale for every block
    rows.py      a row of codes times one row of x: for few rows of x
    tiles.py     eight rows of codes at once times several rows of x: for many
    plain.py     the same for plain numbers (bf16, fp16, fp32)
    products.py  calls the kernels
    choice.py    which of both ways was timed to be faster here
    tests/memory/fast/product_oracle.py is the same function in torch: what all kernels are held against
    unpack.py    weights of a row in fp32, for kernels that sum in another direction, and for ...
    dequantize.py  ... matrices that torch multiplies in the reference arithmetic

Codes. The inputs are cut into blocks of 16, 32 or 64, none of which crosses a group of the weights. A block of x is
rounded to integers q = round_half_even(x / s), s = max|x| / 127 in fp32. The sum of (code - offset) * q over a block is
an integer, exact in any order. Term b, fma(float(sum), w * s, A[b mod 8]) with w the group's scale, is added in the
order of blocks; zeros likewise, fma(zero, float(sum of q) * s, Z[b mod 8]). In the k-quants scales and zeros are
integers times numbers that 256 inputs share, exact in fp32. y is the tree over A[j] + Z[j]: with p[j] = A[j] + A[j + 4]
it is (p[0] + p[2]) + (p[1] + p[3]), times the scale of its row where rows have one.

Plain numbers. A[k mod 8] = fma(W[k], x[k], A[k mod 8]) in fp32, in the order of k; the same tree.

Source of the idea: integer block sums as in ggml's Q4_0 x Q8_0 products (llama.cpp); the order is our own.
"""
