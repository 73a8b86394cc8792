"""Tools of the Responses API, and which of them may be called."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvbus_protocols.conversation import Grammar, ToolChoice, ToolSpec
from kvbus_protocols.decoding import converted
from kvbus_protocols.errors import InvalidRequest

SEARCH = "tool_search"
NAMED = ("function", "custom")


class ToolFormat(msgspec.Struct, frozen=True):
    """Of a custom tool's input: ``text``, or a ``grammar``."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """Function, custom, namespace (with ``tools`` of its own), tool_search; all other types are tools that the server would run."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: list["Tool"] | None = None
    defer_loading: bool | None = None
    execution: str | None = None


class SelectedTool(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class ToolSelection(msgspec.Struct, frozen=True):
    """``tool_choice``, checked. ``tools``: only these may be called (empty: all); ``named``: the one tool that was asked for."""

    mode: Literal["auto", "none", "required"] = "auto"
    tools: tuple[SelectedTool, ...] = ()
    named: bool = False


class _Choice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[SelectedTool] | None = None


class Callee(msgspec.Struct, frozen=True):
    """What a name that the model calls stands for. ``kind``: which item such a call becomes."""

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom", "search"] = "function"


class Toolbox:
    """The callable tools of one request, each under a name of its own.

    The model sees bare names. Where two namespaces have a tool of one name, the later one goes by ``namespace__name``: the names
    that stand at the top of the prompt never change because of tools that come later.
    """

    def __init__(self) -> None:
        self._specs: dict[str, ToolSpec] = {}
        self._seen: dict[tuple[str | None, str], str] = {}
        self.callees: dict[str, Callee] = {}

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(self._specs.values())

    def name_of(self, namespace: str | None, name: str) -> str:
        """What the model calls it."""
        return self._seen.get((namespace, name), name)

    def add(self, tools: Sequence[Tool], where: str, *, deferred: bool = False) -> list[ToolSpec]:
        """Their specs, those known already included. Raise InvalidRequest for a tool without a name or with a bad grammar."""
        searchable = any(tool.type == SEARCH and tool.execution == "client" for tool in tools)
        added = []
        for i, tool in enumerate(tools):
            inner = tool.tools or [] if tool.type == "namespace" else [tool]
            if tool.type == "namespace" and tool.name is None:
                raise _missing(f"{where}[{i}].name")
            for j, one in enumerate(inner):
                path = f"{where}[{i}].tools[{j}]" if tool.type == "namespace" else f"{where}[{i}]"
                namespace = tool.name if tool.type == "namespace" else None
                # Without a search on the client's side nobody would ever load them.
                later = deferred or bool((one.defer_loading or tool.defer_loading) and searchable)
                spec = self._add(one, namespace, path, deferred=later)
                if spec is not None:
                    added.append(spec)
        return added

    def _add(self, tool: Tool, namespace: str | None, path: str, *, deferred: bool) -> ToolSpec | None:
        if tool.type == SEARCH and tool.execution == "client":
            callee = Callee(SEARCH, kind="search")
        elif tool.type in NAMED:
            if not tool.name:
                raise _missing(f"{path}.name")
            callee = Callee(tool.name, namespace, "custom" if tool.type == "custom" else "function")
        else:
            return None
        key = (namespace, callee.name)
        if key in self._seen:
            return self._specs[self._seen[key]]
        name = callee.name
        while name in self._specs:
            name = f"{namespace or callee.kind}__{name}"
        spec = ToolSpec(
            name=name,
            description=tool.description,
            parameters=tool.parameters,
            strict=bool(tool.strict),
            custom=callee.kind == "custom",
            grammar=_grammar(tool.format, path),
            namespace=namespace,
            deferred=deferred,
        )
        self._specs[name], self._seen[key], self.callees[name] = spec, name, callee
        return spec

    def choice(self, selection: ToolSelection) -> ToolChoice:
        names = (self.name_of(tool.namespace, tool.name or "") for tool in selection.tools)
        return ToolChoice(selection.mode, tuple(name for name in names if name in self._specs), selection.named)


def _grammar(form: ToolFormat | None, path: str) -> Grammar | None:
    if form is None or form.type != "grammar":
        return None
    if form.definition is None:
        raise _missing(f"{path}.format.definition")
    match form.syntax:
        case "lark" | "regex" as syntax:
            return Grammar(syntax, form.definition)
        case other:
            raise InvalidRequest(
                f"Invalid value: '{other}'. Supported values are: 'lark' and 'regex'.",
                param=f"{path}.format.syntax",
                code="invalid_value",
            )


def selection_of(choice: str | Mapping[str, Any] | None) -> ToolSelection:
    """Raise InvalidRequest."""
    match choice:
        case None | "auto":
            return ToolSelection()
        case "none":
            return ToolSelection("none")
        case "required":
            return ToolSelection("required")
        case str():
            raise InvalidRequest(
                f"Invalid value: '{choice}'. Supported values are: 'none', 'auto', and 'required'.",
                param="tool_choice",
                code="invalid_value",
            )
    given = converted(choice, _Choice, "tool_choice")
    if given.type == "allowed_tools":
        tools = tuple(tool for tool in given.tools or () if tool.type in NAMED)
        return ToolSelection("required" if given.mode == "required" else "auto", tools)
    if given.type not in NAMED:
        raise InvalidRequest(
            f"This server runs no tools itself, so '{given.type}' cannot be chosen.",
            param="tool_choice",
            code="unsupported",
        )
    if not given.name:
        raise _missing("tool_choice.name")
    return ToolSelection("required", (SelectedTool(given.type, given.name, given.namespace),), named=True)


def check_selection(selection: ToolSelection, tools: Sequence[Tool], *, may_come_later: bool) -> None:
    """Raise InvalidRequest when what was chosen is not there. ``may_come_later``: the input brings tools of its own."""
    if may_come_later:
        return
    names = {name for tool in tools for name in _names(tool)}
    if selection.mode == "required" and not names:
        raise InvalidRequest("Tool choice 'required' must be specified with 'tools' parameter.", param="tool_choice")
    bare = {name for _, name in names}
    for tool in selection.tools:
        known = (tool.namespace, tool.name) in names if tool.namespace is not None else tool.name in bare
        if not known:
            raise InvalidRequest(
                f"Tool choice '{tool.type}' not found in 'tools' parameter: '{tool.name}'.", param="tool_choice"
            )


def _names(tool: Tool) -> list[tuple[str | None, str | None]]:
    if tool.type == "namespace":
        return [(tool.name, inner.name) for inner in tool.tools or () if inner.type in NAMED]
    if tool.type in NAMED:
        return [(None, tool.name)]
    return [(None, SEARCH)] if tool.type == SEARCH and tool.execution == "client" else []


def _missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
