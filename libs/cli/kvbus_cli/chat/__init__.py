"""`kvbus chat`: a small terminal chat over the Chat Completions API."""
