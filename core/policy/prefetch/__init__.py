"""When prefetching pays."""
