"""Model folders in the Hugging Face layout: the small real model, tiny random ones, their identity. Nothing here imports torch."""
