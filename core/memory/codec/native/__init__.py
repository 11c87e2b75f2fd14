"""CPU kernels that multiply directly from slots, each compiled at run time for one matrix of one format.

    states.py    converts states to integers, in the order of the codes
    codes.py     reads codes as integers, in any of the layouts
    product.py   rows of codes times states
    dequantize.py  dequantises rows of codes, for prompts
    team_code.py  what threads run that share the rows of a product
    threads.py   these threads
    products.py  calls the kernels
    plain.py     the same for blocks of plain numbers, whose states are converted to fp32

They read the blob's own bytes: nothing is repacked, and weights are dequantised in registers only. With codes, a state
is converted to integers, integer products are summed exactly, and one rounding follows per 32 to 128 inputs, in fp32:
the result is as close to the exact product as its number type allows, for any number of threads.
"""
