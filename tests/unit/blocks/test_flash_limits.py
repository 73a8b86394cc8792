import pytest

from kvbus_blocks.flash import FlashUnavailable, flash_maker, layout
from kvbus_blocks.flash.index import FlashIndex
from kvbus_testkit.flash import kernels


def test_numbers_of_blocks_that_do_not_fit_into_its_words_are_refused() -> None:
    for count in (0, layout.MAX_BLOCKS + 1):
        with pytest.raises(ValueError, match="blocks"):
            FlashIndex(kernels(), max_blocks=count)
    with pytest.raises(FlashUnavailable, match="blocks"):
        flash_maker(layout.MAX_BLOCKS + 1)
