"""A decoder layer on a GPU in the fast arithmetic, in Triton: the bits of `core.runtime.program` on a CPU.

exp.py          exp in fp32, and the sigmoid
gate.py         the activation between an expert's products
combine.py      the weighted sum of a token's experts, by itself and in one kernel with their second product
experts.py      launches: a token through its experts, and several tokens
hosted.py       tells the host which experts of a token have no slot, and joins what it has computed
mailbox.py      where both write that; flags.py: how each knows that the other has
rms.py          residual and RMSNorm
rotate.py       norms of heads, rotary embedding, KV write
attend.py       attention over the KV cache
route.py        the experts of a token and their weights
activate.py     the activation between the products of a dense layer
layer.py        launches of the last five
recorder.py, check.py, check_layer.py  compile all of them without a GPU
"""
