"""The embedded engine: real transformers (Llama, Qwen2, Qwen3 families) on torch with a paged, shared KV cache.

    settings   config        read without torch
    block_pool sequence scheduler     the pure core: which tokens are computed in which step, in which blocks
    weights    model    attention  kv_cache  sampler      the mathematics
    compute    engine        one step after the other in a thread of its own; the Engine seam around it

Only `weights` and what needs it import torch, so that settings can be read and checked without it.
"""
