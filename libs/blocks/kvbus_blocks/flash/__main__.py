"""``python -m kvbus_blocks.flash``: compile the kernels for this processor and keep them, so that no service has to."""

from kvbus_blocks.flash.compiled import default_folder, load

if __name__ == "__main__":
    load(default_folder())
