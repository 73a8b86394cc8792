"""An agent written with `openai-agents`."""

import asyncio

from agents import (  # type: ignore[import-not-found]  # only where the agent runs
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

from tests.agents.clients.sdk_program import FUNCTIONS, INSTRUCTIONS, Program


async def run(program: Program) -> None:
    client = AsyncOpenAI(base_url=f"{program.url}/v1", api_key="local", timeout=program.timeout_s)
    if program.api == "chat":
        # Thoughts go back by themselves only to models of some vendors.
        model = OpenAIChatCompletionsModel(
            model=program.model, openai_client=client, should_replay_reasoning_content=lambda _: True
        )
        settings = ModelSettings(include_usage=True)
    else:
        model = OpenAIResponsesModel(model=program.model, openai_client=client)
        settings = ModelSettings(
            store=False, reasoning=Reasoning(summary="auto"), response_include=["reasoning.encrypted_content"]
        )
    tools = [function_tool(function) for function in FUNCTIONS]
    agent = Agent(name="coder", instructions=INSTRUCTIONS, tools=tools, model=model, model_settings=settings)
    if program.streams:
        result = Runner.run_streamed(agent, program.history)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, program.history)
    program.history = result.to_input_list()
    program.end(result.final_output)


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(run(Program()))
