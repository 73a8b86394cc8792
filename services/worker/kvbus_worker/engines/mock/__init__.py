"""The mock engine: a timing model with real block bookkeeping, and a player of given raw model output.

It never computes a token. It batches, caches, evicts and reports exactly as an engine that does, so that all around it can be
tested and load-tested on a small machine. `scheduler.MockScheduler` is pure and takes its clock, so simulations run it under a
virtual one.
"""

from kvbus_worker.engines.mock.engine import MockConfig, MockEngine, block_data
from kvbus_worker.engines.mock.timing import TimingModel
from kvbus_worker.engines.mock.vocabulary import TokenizerVocabulary

__all__ = ["MockConfig", "MockEngine", "TimingModel", "TokenizerVocabulary", "block_data"]
