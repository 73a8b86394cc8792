"""Stream parsers for what language models write: reasoning and tool calls, in every wire format. Standard library only."""
