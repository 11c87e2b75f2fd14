"""Access control: host names, allowed origins, tokens, and browser security headers."""
