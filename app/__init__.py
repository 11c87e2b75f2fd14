"""The dashboard, the commands and what they are built of."""

from app.start.gradio_import import skip_interface_files

skip_interface_files()
