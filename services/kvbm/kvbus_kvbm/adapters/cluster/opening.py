"""The store that a URL names."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvbus_kvbm.adapters.cluster.directory import DirectoryStore
from kvbus_kvbm.adapters.cluster.s3 import S3Bucket
from kvbus_kvbm.adapters.cluster.store import ClusterStore
from kvbus_kvbm.core.cluster_limits import ClusterLimits
from kvbus_kvbm.core.errors import StorageRefused


def open_store(url: str, limits: ClusterLimits) -> ClusterStore:
    """``url``: checked by `check_store_url`. Nothing is asked of the store yet. Raise StorageRefused."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return DirectoryStore(Path(unquote(parts.path)), limits.parallel)
    try:
        return S3Bucket(url, max(limits.read_deadline_s, limits.write_deadline_s))
    except ModuleNotFoundError as error:
        raise StorageRefused("g4_url: S3 needs the extra: pip install 'kvbus[s3]'") from error
    except Exception as error:  # of the library, about the variables it reads
        raise StorageRefused(f"g4_url: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
