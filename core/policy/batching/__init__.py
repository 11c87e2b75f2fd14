"""Which sequences are computed together: regrouped by the experts that they are expected to need."""

from core.policy.batching.scheduler import NoScheduler, RandomScheduler, Scheduler, TokenScheduler, in_order
from core.policy.batching.unions import batch_accuracy, union_size

__all__ = ["NoScheduler", "RandomScheduler", "Scheduler", "TokenScheduler", "batch_accuracy", "in_order", "union_size"]
