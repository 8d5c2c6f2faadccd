"""Loading models, one at a time."""

from __future__ import annotations

import threading

ONE_MODEL = threading.Lock()
"""Held around transformers' loading: it changes torch's defaults for the whole process, so a second thread would get a model
without data. Workers in one process (`--in-process`) load in threads of their own."""
