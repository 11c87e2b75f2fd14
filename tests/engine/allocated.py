"""What torch's CPU allocator hands out."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that it had handed out at once during `run`, above what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
