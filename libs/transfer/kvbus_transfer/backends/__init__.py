"""Ways to move blocks. One contract (`base.Backend`), one suite of tests for all."""
