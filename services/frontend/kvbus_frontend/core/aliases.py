"""Other names for models. Harnesses ask for models by names that are built into them."""

from collections.abc import Container, Iterator, Mapping

ANY = "*"


class Aliases:
    """``names``: alias to model; the alias ``*`` stands for every name that is neither a model nor an alias."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    @classmethod
    def parse(cls, text: str) -> "Aliases":
        """From ``alias=model`` pairs, separated by commas. Raise ValueError."""
        names: dict[str, str] = {}
        for pair in filter(None, (pair.strip() for pair in text.split(","))):
            alias, equals, model = (part.strip() for part in pair.partition("="))
            if not (alias and equals and model):
                raise ValueError(f"model_aliases: '{pair}' is not alias=model")
            if alias in names:
                raise ValueError(f"model_aliases names '{alias}' twice")
            names[alias] = model
        return cls(names)

    def resolve(self, name: str, served: Container[str]) -> str:
        """A served model's own name comes first."""
        if name in served:
            return name
        return self._names.get(name) or self._names.get(ANY) or name

    def of(self, models: Container[str]) -> Iterator[tuple[str, str]]:
        """The aliases of these models that can be listed: alias and model."""
        for alias, model in self._names.items():
            if alias != ANY and model in models and alias not in models:
                yield alias, model
