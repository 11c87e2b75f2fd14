"""The Gradio page: sidebar, tabs, and the live deck."""
