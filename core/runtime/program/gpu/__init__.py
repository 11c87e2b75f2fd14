"""The experts of a layer on a GPU in the fast arithmetic, in Triton: the bits of `core.runtime.program` on a CPU.

exp.py      exp in fp32, and the sigmoid
gate.py     the activation between an expert's products
combine.py  the weighted sum of a token's experts, by itself and in one kernel with their second product
experts.py  launches: a token through its experts, and several tokens
"""
