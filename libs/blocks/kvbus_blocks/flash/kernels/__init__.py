"""What is compiled by numba. Only the compiling process imports these modules (`kvbus_blocks.flash.build`)."""
