"""transformers draws progress bars while it loads and saves; the library must stay silent."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, transformers draws no progress bar; afterwards its hook is the caller's again."""
    previous = logging.set_tqdm_hook(lambda _factory, args, kwargs: logging.EmptyTqdm(*args))
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)
