"""``python``, forked from what has imported already: ``python forked.py -m MODULE ...``.

pytest-xdist takes it for Python: each of its workers would import for twenty seconds of a CPU what
all tests need.
"""

import os
import socket
import sys

import warm

if __name__ == "__main__":
    command = [word for word in sys.argv[1:] if word != "-u"]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(warm.shared())
        own = {"cwd": os.getcwd(), "env": os.environ, "outputs": (sys.stdout, sys.stderr)}
        code = warm.ask(server, command, **own, given=sys.stdin)
    sys.exit(code & 0xFF)
