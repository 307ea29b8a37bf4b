"""Which published artifacts DVC has recorded, so that it is not asked about them again."""

import json
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from infra.durable import read_json, write_atomically

FILE = ".committed.json"
_lock = threading.Lock()


class Recorded:
    """The record of one workspace: {stage's name in DVC: its artifact's digest}.

    Args:
        root: The workspace, whose lock is held.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / FILE

    def known(self) -> dict[str, str]:
        """What is recorded; nothing if that cannot be read: DVC is asked again then."""
        digests = read_json(self._path)
        return digests if isinstance(digests, dict) else {}

    def add(self, digests: Mapping[str, str | None]) -> None:
        """Note what DVC has recorded by now."""
        with _lock:
            self._write({**self.known(), **digests})

    def forget(self, stages: Collection[str]) -> None:
        """Let DVC be asked about ``stages`` again."""
        with _lock:
            known = self.known()
            if known.keys() & set(stages):
                self._write({s: digest for s, digest in known.items() if s not in stages})

    def _write(self, digests: Mapping[str, str | None]) -> None:
        write_atomically(self._path, json.dumps(digests, indent=1, sort_keys=True))
