"""Who may ask the server for what: names it answers to, pages it listens to, tokens, what a browser may do with it."""
