"""Loading models, one at a time, and without a progress bar where nobody watches one."""

from __future__ import annotations

import sys
import threading

from transformers.utils import logging

ONE_MODEL = threading.Lock()
"""Held around transformers' loading: it changes torch's defaults for the whole process, so a second thread would get a model
without data. Workers in one process (`--in-process`) load in threads of their own."""

if not sys.stderr.isatty():
    logging.disable_progress_bar()
