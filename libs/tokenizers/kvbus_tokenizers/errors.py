"""Errors of this package.

TokenizerError
├── BundleInvalid          the bytes are no model bundle, or it breaks a limit
├── TokenizerUnsupported   no backend can load this tokenizer.json
├── TextNotEncodable       the backend gives up on this text
└── TemplateFailed         the chat template is broken, or refuses these messages (``refused``)
"""


class TokenizerError(Exception):
    """Root of this package's errors; ``code`` is stable."""

    code = "tokenizer_error"


class BundleInvalid(TokenizerError):
    code = "bundle_invalid"


class TokenizerUnsupported(TokenizerError):
    code = "tokenizer_unsupported"


class TextNotEncodable(TokenizerError):
    code = "text_not_encodable"


class TemplateFailed(TokenizerError):
    """``refused``: the template itself called ``raise_exception``; its words are meant for the user."""

    code = "template_failed"

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
