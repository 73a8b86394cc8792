"""GET /v1/models and GET /v1/models/{id}, in the dialect of the client"""

from aiohttp import web

from kvbus_frontend.adapters.http_server import speaks_anthropic
from kvbus_frontend.adapters.models import Models, ServedModel
from kvbus_frontend.core.pages import page_of
from kvbus_frontend.handlers.api import json_response
from kvbus_protocols.errors import model_not_found
from kvbus_protocols.models import AnthropicModelList, Model, ModelList, ServedAs, anthropic_model, model_entry


class ModelsHandler:
    """``max_output_tokens``: of any request; 0 is what the context leaves."""

    def __init__(self, models: Models, max_output_tokens: int) -> None:
        self._models = models
        self._max_output_tokens = max_output_tokens

    async def list(self, http_request: web.Request) -> web.Response:
        """Anthropic's list comes in pages, OpenAI's in one piece. Aliases come last."""
        served = {model.name: model for model in self._models.served()}
        models = [_described(name, model, self._max_output_tokens) for name, model in served.items()]
        models += [
            _described(alias, served[name], self._max_output_tokens) for alias, name in self._models.aliases.of(served)
        ]
        if not speaks_anthropic(http_request):
            return json_response(ModelList(data=models))
        page = page_of(models, lambda model: model.id, http_request.query)
        return json_response(
            AnthropicModelList(
                data=[anthropic_model(model) for model in page.items],
                has_more=page.has_more,
                first_id=page.items[0].id if page.items else None,
                last_id=page.items[-1].id if page.items else None,
            )
        )

    async def get(self, http_request: web.Request) -> web.Response:
        """The id may hold slashes."""
        name = http_request.match_info["id"]
        model = self._models.get(name)
        if model is None:
            raise model_not_found(name)
        described = _described(name, model, self._max_output_tokens)
        return json_response(anthropic_model(described) if speaks_anthropic(http_request) else described)


def _described(name: str, model: ServedModel, max_output_tokens: int) -> Model:
    card, formats = model.card, model.formats
    return model_entry(
        name,
        root=card.name,
        created=card.created_s,
        context_length=card.context_length,
        max_output_tokens=min(max_output_tokens or card.context_length, card.context_length),
        served=ServedAs(formats.tool, formats.reasoning, model.text.efforts, model.offer.guidance),
    )
