"""OpenAI's own schemas of the older APIs, as a check of what we send.

``schemas/openai_chat.json`` is a part of github.com/openai/openai-openapi (MIT, see the licence beside it).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

SCHEMAS = Path(__file__).parent / "schemas" / "openai_chat.json"


@cache
def _validator(name: str) -> Draft202012Validator:
    components = json.loads(SCHEMAS.read_text())["components"]
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


def check_schema(name: str, document: Any) -> None:
    """``name``: CreateChatCompletionResponse, CreateChatCompletionStreamResponse, CreateCompletionResponse, ErrorResponse, .."""
    problem = best_match(_validator(name).iter_errors(document))
    assert problem is None, f"{name}: {'/'.join(map(str, problem.absolute_path))}: {problem.message[:300]}"
