"""An agent written with `anthropic`."""

from typing import Any

from anthropic import Anthropic

from tests.agents.clients.sdk_program import FUNCTIONS, INSTRUCTIONS, Program, run_tool, schema_of


def loop(client: Anthropic, program: Program) -> str:
    history = program.history
    while True:
        request: dict[str, Any] = {
            "model": program.model,
            "system": INSTRUCTIONS,
            "messages": history,
            "tools": [{"name": f.__name__, "description": f.__doc__, "input_schema": schema_of(f)} for f in FUNCTIONS],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "max_tokens": 8192,
        }
        if program.streams:
            with client.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**request)
        history.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": run_tool(call.name, dict(call.input))}
            for call in calls
        ]
        history.append({"role": "user", "content": results})


def main() -> None:
    program = Program()
    client = Anthropic(base_url=program.url, api_key="local", timeout=program.timeout_s)
    program.end(loop(client, program))


if __name__ == "__main__":
    main()
