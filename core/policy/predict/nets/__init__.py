"""Small networks that predict routing: torch modules and their training. Predictors get them from a View.

The only part of `core.policy.predict` that imports torch; nothing else in it imports this package."""
