"""``/v1/responses``: requests, items, the response object, stream events. Field names and shapes are OpenAI's."""
