"""Low-priority worker processes beside the engine: how they are started, and the messages to them."""
