"""The page: sidebar, tabs, and the live deck."""
