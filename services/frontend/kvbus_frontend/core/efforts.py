"""The reasoning efforts that a model's template knows, found by trying."""

from kvbus_tokenizers import ChatTemplate, TemplateFailed

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
COMMON_EFFORTS = ("low", "medium", "high")
"""Those of all three APIs: assumed of a template that writes whatever it is given."""

_UNKNOWN = "k-effort"


def efforts_of(template: ChatTemplate | None) -> tuple[str, ...]:
    """The values of ``reasoning_effort`` that make a difference to the prompt, weakest first."""
    if template is None or "reasoning_effort" not in template.variables:
        return ()
    otherwise = _rendered(template, _UNKNOWN)
    if otherwise is not None and _UNKNOWN in otherwise:
        return COMMON_EFFORTS
    prompts = {effort: _rendered(template, effort) for effort in EFFORTS}
    return tuple(effort for effort, prompt in prompts.items() if prompt not in (None, otherwise))


def _rendered(template: ChatTemplate, effort: str) -> str | None:
    """None: the template refuses it."""
    variables = {"reasoning_effort": effort, "enable_thinking": True, "thinking": True}
    try:
        return "".join(s.text for s in template.render([{"role": "user", "content": "k"}], variables=variables))
    except TemplateFailed:
        return None
