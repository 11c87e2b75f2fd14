"""python -m tests.architectures > docs/architectures.md: takes some minutes."""

from __future__ import annotations

import logging
import sys

import torch
import transformers

from tests.architectures.scan import moe_types
from tests.architectures.table import page
from tests.architectures.trial import try_type

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    sys.stdout.write(page([try_type(name) for name in moe_types()]))
