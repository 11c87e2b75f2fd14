"""The decode program on a CPU: everything between the products of a decoder layer, and the models that it knows.

vectors.py       fields of a call, eight lanes, the one order of a sum
exp.py           exp, sigmoid, tanh, softplus
rms.py           residual and RMSNorm
rotate.py        norms of heads, rotary embedding, KV write
attend.py        attention over the KV cache
attend_block.py  ... of some queries over a block of it
latent.py        queries and keys of attention to latents: norm, rotary embedding, KV write
absorb.py        ... the matrix between latents and the heads' keys and values
convolve.py      a convolution of channels over rows
delta_inputs.py  what the gated delta rule takes of a row
delta_rule.py    the states that rows read and change
gated_heads.py   heads times the activation of their gates
route.py         the experts of a token and their weights
choose.py        ... the greatest of some numbers
gate.py          the activation between an expert's products
group.py         ... pairs of rows and experts by expert, with their slots
bias.py          what is added to a product
combine.py       the weighted sum of experts
cap.py           bounds of logits

weights.py       dense weights and norms of a model's modules
trial.py         what a layer's attention makes of random states
activation.py    which activation a module has
head_gates.py    which gates attention has
attention.py     attention of a layer, found by trying its module
latent_attention.py, delta_net.py  attention to latents, a gated delta net, likewise
feed_forward.py  dense layers, routers, shared experts, likewise
beside.py        experts beside a dense layer, likewise
mixer.py         what all of attention and its like are to a pass
build.py         the steps of a pass
bind.py          the layers of a whole model
program.py       a pass over them
experts.py       what the layers' experts share: their products, and the activation between them
token.py, few.py, many.py  the experts of one row, of a few and of many

The kernels are in the files above weights.py. A kernel is void(ptr arguments, i64 from, i64 to): it computes the units
from..to - 1, which are independent of each other. `arguments` points to the fields that its module lists in FIELDS, 8
bytes each: an address, or an i64. What the compiled code depends on is a frozen dataclass, and `kernel(spec)` returns
the code's address.

What a row results in is one function of that row alone: it has the same bits among any other rows, for any split into
units, on any thread. A sum over k takes product k by a fused multiply-add into lane k mod 8, in the order of k, and
`vectors.total` adds up the lanes; sums of convolve.py and over the rows of a state are in the order of k alone. Vectors
are always of 8 fp32 lanes, and nothing is reassociated or contracted.
"""
