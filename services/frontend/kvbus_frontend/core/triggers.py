"""What a conversation's newest turn is: a person's word, or what a tool has found."""

from collections.abc import Sequence

from kvbus_protocols.conversation import Turn

USER, TOOL = "user", "tool"


def input_trigger(turns: Sequence[Turn]) -> str:
    """Of what came after the model's last turn. Harnesses put reminders beside results, so one result makes it a tool's turn.

    Empty when nothing came after it.
    """
    trigger = ""
    for turn in reversed(turns):
        if turn.role == "assistant":
            break
        if turn.role == "tool":
            return TOOL
        if turn.role == "user":
            trigger = USER
    return trigger
