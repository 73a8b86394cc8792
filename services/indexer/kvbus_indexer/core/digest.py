"""A digest of the content that does not depend on the order in which it came, so that replicas can be compared.

Keys are hashes, so their sum modulo 2**64 tells two sets apart (it is no defence against somebody who makes up keys). It is made
when it is asked for, feed by feed: a summand per event would cost every event what is needed once a day.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import msgspec

from kvbus_indexer.core.catalog import Catalog
from kvbus_wire.indexer import FeedDigest

_MODULUS = 1 << 64
DIGEST_BYTES = 16


def feed_digests(catalog: Catalog) -> Iterator[FeedDigest]:
    """Those that hold something, each as of one moment; a good moment to do something else lies between any two."""
    for instance in catalog.all_instances():
        for feed in list(instance.applied):
            held = catalog.held(instance, feed)
            if held.keys and catalog.instance(instance.instance_id) is instance:
                yield FeedDigest(
                    instance_id=instance.instance_id,
                    incarnation=instance.incarnation,
                    model=feed.model,
                    tier=feed.tier,
                    kv_seq=instance.applied[feed],
                    entries=len(held.keys),
                    key_sum=sum(held.keys) % _MODULUS,
                )


def combined(feeds: Iterable[FeedDigest]) -> str:
    """Equal for equal content, whatever is still on its way to either."""
    rows = sorted((f.model, f.instance_id, f.incarnation, f.tier, f.entries, f.key_sum) for f in feeds)
    return blake2b(msgspec.msgpack.encode(rows), digest_size=DIGEST_BYTES).hexdigest()
