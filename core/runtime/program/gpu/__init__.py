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
gated_heads.py  heads times the activation of their gates
route.py        the experts of a token and their weights
activate.py     the activation between the products of a dense layer
cap.py          bounds of logits
layer.py        launches of the last seven
convolve.py, delta_rule.py, delta_kernels.py  what is between the products of a gated delta net, and launches of it
latent.py, absorb.py, unpack.py, latent_kernels.py  ... of attention to latents
mixer.py        what all of attention and its like are to a pass
attention.py, delta_net.py, latent_attention.py  mixers
program.py      a pass
recorder.py, check.py, check_layer.py  compile all of them without a GPU
"""
