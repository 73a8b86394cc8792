"""The names of all bus subjects. Segments that come from users are percent-encoded: a model name may hold dots and slashes."""

from urllib.parse import quote, unquote

PREFIX = "kvbus.v1"


def escape(segment: str) -> str:
    """A subject token for any non-empty text. Raise ValueError for empty text."""
    if not segment:
        raise ValueError("a subject segment may not be empty")
    return quote(segment, safe="").replace(".", "%2E").replace("~", "%7E")


def unescape(token: str) -> str:
    return unquote(token)


class Subjects:
    """All subjects of one namespace. Pass ``*`` for a wildcard segment where the docstring says so."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.root = f"{PREFIX}.{escape(namespace)}"

    def _name(self, *segments: str) -> str:
        return ".".join([self.root, *(s if s == "*" else escape(s) for s in segments)])

    def route(self, model: str) -> str:
        """RouteRequest -> Placement (queue group of routers; ``*`` to serve every model)."""
        return self._name("route", model)

    def progress(self, model: str) -> str:
        """Progress, published by frontends to all routers (``*``)."""
        return self._name("router", model, "progress")

    def decisions(self, model: str) -> str:
        """Decision, published by routers to router replicas (``*``)."""
        return self._name("router", model, "decisions")

    @property
    def routers_control(self) -> str:
        """ExplainRoute, GetLimits, SetLimits -> RouteExplanation, RouterLimits (queue group of routers)."""
        return self._name("routers", "control")

    def router_control(self, router_id: str) -> str:
        """The same of one router, and ExplainPlaced -> RouteExplanation."""
        return self._name("routers", router_id, "control")

    def index_query(self, model: str) -> str:
        """IndexQuery -> IndexReply (queue group of indexers; ``*``)."""
        return self._name("index", model, "query")

    def indexer_query(self, indexer_id: str) -> str:
        """The same of one indexer."""
        return self._name("indexers", indexer_id, "query")

    def indexer_control(self, indexer_id: str) -> str:
        """DescribeIndex, DigestIndex, RankPrefixes -> IndexDescription, IndexDigest, IndexUse."""
        return self._name("indexers", indexer_id, "control")

    def generate(self, worker_id: str) -> str:
        """Generate -> Accepted | NeedTokens."""
        return self._name("worker", worker_id, "generate")

    def control(self, instance_id: str) -> str:
        """Cancel, ReplaySteps, BlockSnapshot, SetRole, Drain -> their replies. Workers and kvbm instances serve it."""
        return self._name("worker", instance_id, "control")

    def transfer(self, worker_id: str) -> str:
        """StartPrefill, NextBlocks, EndPrefill -> PrefillStarted, BlocksReady, Done: from other workers."""
        return self._name("worker", worker_id, "transfer")

    def steps(self, frontend_id: str) -> str:
        """StepFrame, published by workers to one frontend."""
        return self._name("frontend", frontend_id, "steps")

    def frontend_control(self, frontend_id: str) -> str:
        """CancelResponse -> Done."""
        return self._name("frontend", frontend_id, "control")

    @property
    def response_events(self) -> str:
        """Prefix of the subjects (one per response id) with the events of responses that run in the background."""
        return self._name("responses")

    def kv_events(self, model: str, instance_id: str) -> str:
        """KvEvents in JetStream (``*`` for both)."""
        return self._name("kv", model, instance_id)

    def load(self, worker_id: str) -> str:
        """LoadReport, published by workers (``*``)."""
        return self._name("load", worker_id)

    def kvbm(self, instance_id: str) -> str:
        """AttachPool, PinBlocks, ... -> their replies."""
        return self._name("kvbm", instance_id)

    @property
    def kv_stream(self) -> str:
        """Name of the JetStream stream that holds the KV events."""
        return f"KVBUS_KV_{self._bucket_suffix}"

    @property
    def instances_bucket(self) -> str:
        """Name of the key-value bucket with the leased instance records."""
        return f"kvbus_instances_{self._bucket_suffix}"

    @property
    def settings_bucket(self) -> str:
        """Name of the key-value bucket with what was changed at run time."""
        return f"kvbus_settings_{self._bucket_suffix}"

    @property
    def models_bucket(self) -> str:
        """Name of the object store that holds tokenizers and chat templates, by content hash."""
        return f"kvbus_models_{self._bucket_suffix}"

    @property
    def checkpoints_bucket(self) -> str:
        """Name of the object store with what indexers have saved of their content."""
        return f"kvbus_checkpoints_{self._bucket_suffix}"

    @property
    def responses_bucket(self) -> str:
        """Name of the key-value bucket that holds stored responses."""
        return f"kvbus_responses_{self._bucket_suffix}"

    @property
    def response_events_stream(self) -> str:
        """Name of the JetStream stream that holds the events of responses that run in the background."""
        return f"KVBUS_RESPONSES_{self._bucket_suffix}"

    @property
    def secrets_bucket(self) -> str:
        """Name of the key-value bucket that holds keys which all frontends share."""
        return f"kvbus_secrets_{self._bucket_suffix}"

    @property
    def _bucket_suffix(self) -> str:
        return escape(self.namespace).replace("%", "_")
