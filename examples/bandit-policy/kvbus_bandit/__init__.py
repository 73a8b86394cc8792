"""A routing policy for kvbus that learns how far each worker misses its predictions (Thompson sampling)."""

from kvbus_bandit.policy import BanditPolicy

__all__ = ["BanditPolicy"]
