"""What runs before any package is there: the list of commands, their help, and words for a wrong one. Standard library
only."""
