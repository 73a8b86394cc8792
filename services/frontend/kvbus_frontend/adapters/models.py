"""The models this frontend serves: offers from the directory, their text sides from the object store."""

import asyncio
import ctypes
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from kvbus_frontend.adapters.generation import Spawn
from kvbus_frontend.core.aliases import Aliases
from kvbus_frontend.core.catalog import Departed, Offer, loading_of, offers_of
from kvbus_frontend.core.choice_text import ChoiceText
from kvbus_frontend.core.efforts import efforts_of
from kvbus_frontend.core.formats import Formats, chosen_formats, told_formats, unknown_parsers
from kvbus_frontend.core.message_style import style_of
from kvbus_frontend.core.prompt import Prompt
from kvbus_frontend.core.requests import PromptForm
from kvbus_frontend.core.template_limits import TemplateLimits, limits_of
from kvbus_frontend.core.template_traits import TemplateTraits, traits_of
from kvbus_frontend.settings import FrontendSettings
from kvbus_parsers import open_parser
from kvbus_protocols.generation import GenerationRequest
from kvbus_runtime.discovery import Directory
from kvbus_runtime.errors import RuntimeFailure
from kvbus_runtime.health import Health
from kvbus_runtime.metrics import Metrics
from kvbus_tokenizers import (
    ChatTemplate,
    GenerationConfig,
    Tokenizer,
    TokenizerError,
    load_template,
    load_tokenizer,
    read_generation_config,
    unpack_bundle,
)
from kvbus_wire.records import ModelCard

RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class BundleStore(Protocol):
    async def get(self, name: str) -> bytes:
        """The object of this name. Raise RuntimeFailure."""


class TextSide(msgspec.Struct, frozen=True):
    """What a bundle holds, ready for use. ``end_token_ids``: the tokenizer's own end of a turn.

    ``formats``, ``limits``, ``traits``, ``efforts``: told from the template.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation: GenerationConfig
    end_token_ids: tuple[int, ...]
    formats: Formats
    limits: TemplateLimits
    traits: TemplateTraits
    efforts: tuple[str, ...] = ()


class ServedModel(msgspec.Struct, frozen=True):
    offer: Offer
    text: TextSide

    @property
    def card(self) -> ModelCard:
        return self.offer.card

    @property
    def name(self) -> str:
        return self.offer.card.name

    @property
    def formats(self) -> Formats:
        """The wire formats of the model's output: what its workers say, else what its template tells."""
        return chosen_formats(self.card, self.text.formats)

    @property
    def prompt_form(self) -> PromptForm:
        return PromptForm(self.text.template, self.text.limits, style_of(self.text.traits, self.formats))

    @property
    def system_fingerprint(self) -> str:
        return f"kvbus-{self.card.fingerprint[:12]}"

    def choice_text(
        self, request: GenerationRequest, prompt: Prompt, *, keep_special: bool | None = None
    ) -> ChoiceText:
        """The text of one choice that follows the prompt. ``keep_special``: show special tokens (default: as the request wants)."""
        tokenizer = self.text.tokenizer
        ids = prompt.token_ids if tokenizer.strips_leading_space else ()
        if keep_special is None:
            keep_special = request.skip_special_tokens is False
        detokenizer = tokenizer.detokenizer(prompt=ids, keep_special=keep_special)
        return ChoiceText(detokenizer, request.stop_strings, token_by_token=request.logprob_count is not None)


def load_text_side(data: bytes, name: str) -> TextSide:
    """Takes up to seconds for a large vocabulary. Raise TokenizerError."""
    bundle = unpack_bundle(data, name=name)
    tokenizer = load_tokenizer(bundle)
    generation = read_generation_config(bundle)
    eos = tokenizer.token_id(tokenizer.named_tokens.get("eos_token", ""))
    template = load_template(bundle, tokenizer)
    formats = told_formats(template, bundle)
    # Loads the formats, 0.2 s, here and not in the first request.
    open_parser(tool=formats.tool, reasoning=formats.reasoning)
    end_token_ids = () if eos is None else (eos,)
    traits, efforts = traits_of(template), efforts_of(template)
    limits = limits_of(template, style_of(traits, formats))
    text = TextSide(tokenizer, template, generation, end_token_ids, formats, limits, traits, efforts)
    _return_freed_memory()
    return text


def _return_freed_memory() -> None:
    """Parsing a tokenizer leaves twice its size in freed heap pages (84 of 236 MB for a vocabulary of 150,000): give them back."""
    with suppress(AttributeError, OSError):  # a C library without this call
        ctypes.CDLL(None).malloc_trim(0)


class Models:
    """Follows the directory. A model is served when a worker that is not draining has it and its bundle is loaded."""

    def __init__(
        self,
        directory: Directory,
        store: BundleStore,
        settings: FrontendSettings,
        executor: Executor,
        health: Health,
        metrics: Metrics,
        log: Any,
        spawn: Spawn,
    ) -> None:
        self._directory = directory
        self._store = store
        self.aliases = Aliases.parse(settings.model_aliases)
        self._limit = settings.max_models
        self._executor = executor
        self._health = health
        self._log = log
        self._spawn = spawn
        self._offers: dict[str, Offer] = {}
        self._departed = Departed(keep_s=settings.absent_model_s, limit=settings.max_models)
        self._announced: frozenset[str] = frozenset()
        self._texts: dict[str, TextSide] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, str] = {}
        self._closed = False
        self._served = metrics.gauge("models_served", "models that can be asked for")
        self._loads = metrics.counter("bundle_loads", "model bundles fetched, by outcome", ("outcome",))

    def start(self) -> None:
        self._health.set("models", False, "no worker is known")
        self._health.set("router", False, "no router is known")
        self._directory.on_change(lambda _record, _change: self._update())
        self._update()

    def close(self) -> None:
        """Let go of all models: aiohttp remembers every handler that it has called, and all it refers to, for good."""
        self._closed = True
        self._offers = {}
        self._load_missing()

    def get(self, name: str) -> ServedModel | None:
        """By the model's own name or an alias."""
        offer = self._offers.get(self.aliases.resolve(name, self._offers))
        text = self._texts.get(offer.card.bundle) if offer is not None else None
        return ServedModel(offer, text) if offer is not None and text is not None else None

    def is_loading(self, name: str) -> bool:
        """Whether a model that is not served is being loaded, by a worker or (its bundle) here."""
        name = self.aliases.resolve(name, self._announced | self._offers.keys())
        return name in self._announced or name in self._offers

    def is_expected(self, name: str) -> bool:
        """Whether a model that is not served has just lost its last worker, and may get one soon."""
        name = self.aliases.resolve(name, self._offers)
        return self._departed.holds(name, asyncio.get_running_loop().time())

    def served(self) -> list[ServedModel]:
        return [model for name in self._offers if (model := self.get(name)) is not None]

    def _update(self) -> None:
        if self._closed:
            return
        workers = self._directory.instances("worker")
        self._announced = loading_of(workers)
        offers = offers_of(workers, self._offers)
        for name, offer in offers.items():
            known = self._offers.get(name)
            unknown = unknown_parsers(offer.card)
            if unknown and (known is None or known.card != offer.card):
                self._log.error("unknown_parsers", model=name, parsers=unknown, workers=offer.workers)
            if offer.others and (known is None or known.others != offer.others):
                self._log.error(
                    "model_cards_differ",
                    model=name,
                    fingerprint=offer.card.fingerprint,
                    serving=offer.workers,
                    ignored=offer.others,
                )
        if len(offers) > self._limit:
            self._log.error("too_many_models", limit=self._limit, ignored=list(offers)[self._limit :])
            offers = dict(list(offers.items())[: self._limit])
        self._departed.update(self._offers, offers, asyncio.get_running_loop().time())
        self._offers = offers
        self._load_missing()
        self._report()

    def _load_missing(self) -> None:
        wanted = {offer.card.bundle for offer in self._offers.values()}
        for bundle in [name for name in self._texts if name not in wanted]:
            del self._texts[bundle]
        for bundle in [name for name in self._failures if name not in wanted]:
            del self._failures[bundle]
        for bundle in [name for name in self._loading if name not in wanted]:
            self._loading.pop(bundle).cancel()
        for bundle in wanted - self._texts.keys() - self._loading.keys():
            self._loading[bundle] = self._spawn(self._load(bundle), name=f"load bundle {bundle[:12]}")

    async def _load(self, bundle: str) -> None:
        """Tries until it succeeds or nobody wants the bundle any more (then the task is cancelled)."""
        attempt = 0
        while True:
            try:
                data = await self._store.get(bundle)
                text = await asyncio.get_running_loop().run_in_executor(self._executor, load_text_side, data, bundle)
            except Exception as problem:  # whatever a bundle brings about: it must not end the service
                expected = isinstance(problem, RuntimeFailure | TokenizerError)
                self._loads.labels("failed").inc()
                self._failures[bundle] = str(problem)
                self._log.error(
                    "bundle_failed", bundle=bundle, error=str(problem), attempt=attempt + 1, exc_info=not expected
                )
                self._report()
                await asyncio.sleep(RETRY_PAUSES_S[min(attempt, len(RETRY_PAUSES_S) - 1)])
                attempt += 1
                continue
            break
        self._loads.labels("ok").inc()
        self._failures.pop(bundle, None)
        self._texts[bundle] = text
        self._loading.pop(bundle, None)
        self._log.info(
            "model_loaded",
            bundle=bundle,
            models=[name for name, offer in self._offers.items() if offer.card.bundle == bundle],
            tokenizer=text.tokenizer.backend_name,
            vocabulary=text.tokenizer.vocab_size,
            has_template=text.template is not None,
        )
        self._report()

    def _report(self) -> None:
        served = [model.name for model in self.served()]
        self._served.set(len(served))
        waiting = sorted((self._announced | self._offers.keys()) - set(served))
        if served:
            detail = f"serving {', '.join(served)}"
        elif self._failures:
            detail = f"cannot load: {next(iter(self._failures.values()))}"
        else:
            detail = f"loading {', '.join(waiting)}" if waiting else "no worker is known"
        self._health.set("models", bool(served), detail)
        routers = [record for record in self._directory.instances("router") if not record.draining]
        self._health.set("router", bool(routers), f"{len(routers)} known")
