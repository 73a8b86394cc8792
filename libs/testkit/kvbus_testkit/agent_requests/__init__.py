"""Requests as coding agents send them: the structure, the sizes and what changes from turn to turn are theirs, the text is made up.

``anthropic``: the Messages API; ``openai``: Chat Completions and Responses; ``mutations``: the same requests with mistakes in them.
"""
