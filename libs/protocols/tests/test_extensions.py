"""nvext as Dynamo defines it, and our own kvbus object."""

from typing import Any

import msgspec
import pytest

from kvbus_protocols import InvalidRequest, RequestDecoder
from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.extensions import Prefetch, Retention, Session

DECODER = RequestDecoder(ChatRequest)


def checked(**fields: Any) -> ChatRequest:
    request = DECODER.decode(
        msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    )
    request.check()
    return request


def test_every_field_that_dynamo_defines_is_taken() -> None:
    nvext = {
        "greed_sampling": True,
        "use_raw_prompt": False,
        "annotations": ["token_ids", "request_id"],
        "backend_instance_id": 2**63,
        "prefill_worker_id": 1,
        "decode_worker_id": "w1",
        "dp_rank": 0,
        "prefill_dp_rank": 1,
        "token_data": [1, 2],
        "max_thinking_tokens": 100,
        "cache_salt": "s",
        "extra_fields": ["worker_id", "whatever"],
        "metadata_upload": {"url": "http://host/x"},
        "agent_hints": {
            "priority": -1, "strict_priority": 2, "osl": 3, "speculative_prefill": True, "latency_sensitivity": 0.5,
        },
        "request_timestamp_ms": 1.5,
        "routing_constraints": {"required_taints": ["a"], "preferred_taints": {"b": 0.5}},
        "router": {"ttft_target": 100, "itl_target": 10.5},
    }  # fmt: skip
    request = checked(nvext=nvext)
    assert {name: value for name, value in msgspec.to_builtins(request.nvext).items() if value is not None} == nvext
    assert request.nvext is not None
    assert request.nvext.pin == "w1"
    assert request.nvext.prefill_pin == "1"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nvext": {"cache_control": {"type": "ephemeral"}}}, "nvext.cache_control"),
        ({"nvext": {"agent_hints": {"prio": 1}}}, "nvext.agent_hints.prio"),
        ({"nvext": {"routing_constraints": {"x": 1}}}, "nvext.routing_constraints.x"),
        ({"nvext": {"router": {"x": 1}}}, "nvext.router.x"),
        ({"nvext": {"metadata_upload": {"url": "u", "x": 1}}}, "nvext.metadata_upload.x"),
        ({"kvbus": {"x": 1}}, "kvbus.x"),
        ({"kvbus": {"session": {"id": "s", "x": 1}}}, "kvbus.session.x"),
        ({"kvbus": {"retention": [{"ttl": 1}]}}, "kvbus.retention[0].ttl"),
    ],
)
def test_an_unknown_field_of_an_extension_is_refused_and_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        checked(**fields)
    extension, _, name = field.partition(".")
    assert refusal.value.message == f"invalid {extension}: unknown field `{name.rpartition('.')[2]}`"
    assert (refusal.value.status, refusal.value.param) == (400, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nvext": {"metadata_upload": {"url": "  "}}}, "nvext.metadata_upload.url"),
        ({"nvext": {"extra_fields": ["completion_token_ids"]}, "n": 2}, "nvext.extra_fields"),
        ({"nvext": {"dp_rank": -1}}, "nvext.dp_rank"),
        (
            {"nvext": {"routing_constraints": {"required_taints": ["t"] * 65}}},
            "nvext.routing_constraints.required_taints",
        ),
        (
            {"nvext": {"routing_constraints": {"preferred_taints": {"t": 0}}}},
            "nvext.routing_constraints.preferred_taints",
        ),
        (
            {"nvext": {"routing_constraints": {"preferred_taints": {"t": 1e308}}}},
            "nvext.routing_constraints.preferred_taints",
        ),
        ({"nvext": {"agent_hints": {"priority": 2**31}}}, "nvext.agent_hints.priority"),
        ({"kvbus": {"retention": [{"class": "for-ever"}]}}, "kvbus.retention[0].class"),
        ({"kvbus": {"retention": [{}, {"start_token": 5, "end_token": 5}]}}, "kvbus.retention[1].end_token"),
        ({"kvbus": {"retention": [{"end_token": 0}]}}, "kvbus.retention[0].end_token"),
        ({"kvbus": {"retention": [{"end_token": 1 << 31}]}}, "kvbus.retention[0].end_token"),
        ({"kvbus": {"retention": [{"start_token": 1 << 64}]}}, "kvbus.retention[0].start_token"),
        ({"kvbus": {"retention": [{"class": "pinned"}]}}, "kvbus.retention[0].ttl_s"),
        ({"kvbus": {"retention": [{"ttl_s": 0}]}}, "kvbus.retention[0].ttl_s"),
        ({"kvbus": {"retention": [{"priority": 101}]}}, "kvbus.retention[0].priority"),
        ({"kvbus": {"retention": [{}] * 65}}, "kvbus.retention"),
        ({"kvbus": {"prefetch": {"after_s": -1}}}, "kvbus.prefetch.after_s"),
        ({"kvbus": {"prefetch": {}}}, "kvbus.prefetch.after_s"),
        ({"kvbus": {"session": {"id": ""}}}, "kvbus.session.id"),
        ({"kvbus": {"mock": {"finish": "maybe"}}}, "kvbus.mock.finish"),
    ],
)
def test_an_extension_that_makes_no_sense_is_refused_with_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        checked(**fields)
    assert refusal.value.param == param


def test_our_own_directives_are_taken() -> None:
    request = checked(
        kvbus={
            "session": {"id": "s", "parent": "p", "final": True, "ephemeral": True},
            "retention": [
                {"end_token": 100, "class": "pinned", "ttl_s": 60, "priority": 90},
                {"start_token": 100, "class": "ephemeral"},
            ],
            "prefetch": {"after_s": 2.5},
        }
    )
    assert request.kvbus is not None
    assert request.kvbus.session == Session("s", "p", final=True, ephemeral=True)
    assert request.kvbus.retention == [
        Retention(end_token=100, kind="pinned", ttl_s=60, priority=90),
        Retention(start_token=100, kind="ephemeral"),
    ]
    assert request.kvbus.prefetch == Prefetch(2.5)
