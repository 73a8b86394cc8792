"""An agent written with `openai`."""

import json
from typing import Any

from openai import OpenAI

from tests.agents.clients.sdk_program import FUNCTIONS, INSTRUCTIONS, Program, run_tool, schema_of


def chat(client: OpenAI, program: Program) -> str | None:
    functions = [{"name": f.__name__, "description": f.__doc__, "parameters": schema_of(f)} for f in FUNCTIONS]
    history = program.history
    while True:
        request: dict[str, Any] = {
            "model": program.model,
            "messages": [{"role": "system", "content": INSTRUCTIONS}, *history],
            "tools": [{"type": "function", "function": function} for function in functions],
        }
        if program.streams:
            with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**request).choices[0].message
        history.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            output = run_tool(call.function.name, json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": output})


def responses(client: OpenAI, program: Program) -> str:
    functions = [{"name": f.__name__, "description": f.__doc__, "parameters": schema_of(f)} for f in FUNCTIONS]
    history = program.history
    while True:
        request: dict[str, Any] = {
            "model": program.model,
            "instructions": INSTRUCTIONS,
            "input": history,
            "tools": [{"type": "function", **function, "strict": False} for function in functions],
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "store": False,
        }
        if program.streams:
            with client.responses.stream(**request) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**request)
        history += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        for call in calls:
            output = run_tool(call.name, json.loads(call.arguments))
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def main() -> None:
    program = Program()
    client = OpenAI(base_url=f"{program.url}/v1", api_key="local", timeout=program.timeout_s)
    program.end((chat if program.api == "chat" else responses)(client, program))


if __name__ == "__main__":
    main()
