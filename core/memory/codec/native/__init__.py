"""Products straight out of slots on a CPU: kernels for one matrix of one format, compiled where they run.

    states.py    states as whole numbers, in the order of the codes
    codes.py     codes as whole numbers, wherever they lie
    product.py   rows of codes times states
    widen.py     rows of codes as plain numbers, for prompts
    threads.py   several threads that share one product's rows
    products.py  what calls them

They read a blob's own bytes: nothing is laid out anew, and weights exist in registers alone. A state's numbers become
whole ones, products of whole numbers are summed exactly, and one rounding follows for each 32 to 128 inputs, in fp32:
what comes out is as near to the exact product as its number type allows, whatever the number of threads.
"""
