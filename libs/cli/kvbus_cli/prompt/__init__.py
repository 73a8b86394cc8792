"""`kvbus prompt`: what prompt a request becomes, and where the prompts of two requests part."""
