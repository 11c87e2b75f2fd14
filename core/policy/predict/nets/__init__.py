"""Small networks that predict routing: the torch modules and how they are trained. Predictors get them from a View.

The only part of `core.policy` that knows torch; nothing else in it imports this package.
"""
