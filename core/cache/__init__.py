"""The expert cache: slots and the experts in them, leases of the layer that is computed, and the prefetch queue."""
