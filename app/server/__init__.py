"""The web application: routes, requests within limits, and who may ask for what."""
