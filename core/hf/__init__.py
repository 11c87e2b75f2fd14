"""Interface to transformers: finds the experts, loads everything else, reads experts from disk, hooks the computation
in.

All code that depends on transformers' internals is in this package. Works with transformers >= 5.17, < 5.25.
"""
