"""GET /v1/models and GET /v1/models/{id}"""

from aiohttp import web

from kvbus_frontend.adapters.models import Models, ServedModel
from kvbus_frontend.handlers.api import json_response
from kvbus_protocols.errors import model_not_found
from kvbus_protocols.models import Model, ModelList


class ModelsHandler:
    def __init__(self, models: Models) -> None:
        self._models = models

    async def list(self, http_request: web.Request) -> web.Response:
        return json_response(ModelList(data=[_described(model) for model in self._models.served()]))

    async def get(self, http_request: web.Request) -> web.Response:
        """The id may hold slashes."""
        name = http_request.match_info["id"]
        model = self._models.get(name)
        if model is None:
            raise model_not_found(name)
        return json_response(_described(model))


def _described(model: ServedModel) -> Model:
    card = model.card
    return Model(id=card.name, created=card.created_s, root=card.name, max_model_len=card.context_length)
