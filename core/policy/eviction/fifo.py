"""First in, first out: the cheapest order."""

from core.policy.eviction.base import Eviction
from core.settings.registry import register


@register(
    "eviction",
    "fifo",
    title="FIFO",
    help="The expert that came first leaves, however often it was used since.",
    source="control; the textbook policy",
)
class FIFO(Eviction):
    """Score: the tick of admission, which the base class stores."""
