"""The expert cache: slots and who is in them, leases of a layer that computes, and the prefetch queue."""
