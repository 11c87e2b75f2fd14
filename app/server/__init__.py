"""The web application: routes, request limits, and access control."""
