"""What runs before any package is there: the list of commands, their help, words for a wrong one, and the installation.
Standard library only."""
