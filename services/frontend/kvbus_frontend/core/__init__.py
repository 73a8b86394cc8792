"""The frontend's decisions: conversation to prompt, sampling, text out of tokens, responses. Pure."""
