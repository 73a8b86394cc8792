"""Preparing prompts: what the tokenizer cannot do is the request's fault, on the loop as in a thread."""

from typing import Any, cast

import pytest

from kvbus_frontend.handlers.api import Api
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols import InvalidRequest
from kvbus_runtime.log import get_logger
from kvbus_runtime.metrics import Metrics
from kvbus_tokenizers import TextNotEncodable


@pytest.mark.parametrize("size_bytes", [10, 10_000_000])
async def test_text_that_the_tokenizer_gives_up_on_is_a_bad_request(size_bytes: int) -> None:
    def give_up() -> None:
        raise TextNotEncodable("regex error")

    nothing = cast("Any", None)
    api = Api(FrontendSettings(), nothing, nothing, nothing, nothing, nothing, Metrics("test"), get_logger())
    with pytest.raises(InvalidRequest) as refusal:
        await api.prepare(size_bytes, give_up)
    assert (refusal.value.status, refusal.value.code) == (400, "text_not_encodable")
