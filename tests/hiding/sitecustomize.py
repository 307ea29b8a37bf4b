"""On the path of a process that plays another machine: what lies in a folder is not there for it.

Python imports this module by itself, in whatever the process starts too.

``UPCYCLE_TEST_HIDDEN``: the folder; to open, list or connect to anything in it is refused.
"""

import os
import sys

HIDDEN = os.environ["UPCYCLE_TEST_HIDDEN"]
HARMLESS = ("subprocess.Popen", "os.putenv", "os.unsetenv", "compile", "exec", "import")


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Raise where an argument of what Python does names the folder."""
    if event not in HARMLESS and any(str(a).startswith(HIDDEN) for a in arguments if named(a)):
        raise PermissionError(f"{event} of {arguments}: out of sight")


def named(argument: object) -> bool:
    """Whether it may be a path."""
    return isinstance(argument, str | os.PathLike)


sys.addaudithook(refuse)
