"""Every test session lives in one temporary folder and leaves nothing outside it.

The environment is set here, before anything imports prefect, ray or mlflow: they read it once.
"""

import gc
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import certifi

from infra.temporary import OWNER, hold, remove_left

# Ray's socket paths must stay short, so the folder lies directly in the system's temporary folder;
# that of a process which pytest-xdist starts as well, whose TMPDIR is the first one's already.
if "UPCYCLE_TESTS_SYSTEM_FOLDER" not in os.environ:
    remove_left("upcycle")  # by sessions that were killed
SYSTEM = os.environ.setdefault("UPCYCLE_TESTS_SYSTEM_FOLDER", tempfile.gettempdir())
SESSION = Path(tempfile.mkdtemp(prefix="upcycle-", dir=SYSTEM))
# What the processes of one session share, in the folder of the first.
os.environ.setdefault("UPCYCLE_TESTS_SHARED", str(SESSION))
OWNED = hold(SESSION / OWNER)
for _name in (
    "RAY_ADDRESS",
    "PREFECT_API_URL",
    "PREFECT_PROFILE",
    "MLFLOW_TRACKING_URI",
    "DVC_SITE_CACHE_DIR",
):
    os.environ.pop(_name, None)
for _name, _folder in {
    "HOME": "home",
    "TMPDIR": "tmp",
    "RAY_TMPDIR": "r",
    "PREFECT_HOME": "prefect",
    "UPCYCLE_HOME": "workspace",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
}.items():
    (SESSION / _folder).mkdir()
    os.environ[_name] = str(SESSION / _folder)
os.environ["HF_HUB_OFFLINE"] = "1"
# No test asks anybody beyond this machine, and every client reads all authorities for 20 ms.
_first, _end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
(SESSION / "authority.pem").write_text(_first + _end)
os.environ["SSL_CERT_FILE"] = str(SESSION / "authority.pem")
tempfile.tempdir = None
# A shell's job in the background ignores Ctrl-C, and so would every command that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from infra import settings  # noqa: E402  (the environment comes first)

settings.configure()

import pytest  # noqa: E402  (the same)
from xdist.scheduler import LoadFileScheduling  # noqa: E402  (the same)

TOGETHER = ("tests/upcycle_core/evaluation/tasks",)
"""Folders whose files are one worker's: each process reads the harness's thousands of files once,
for ten seconds, and trains the model that adds once, for as long."""

SERVERLESS = "tests/upcycle_core/"
"""The last tests, which need no server."""

_begun = {}


class Scheduling(LoadFileScheduling):
    """A worker has all tests of a file, or of a folder of ``TOGETHER``."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in TOGETHER else file


def pytest_xdist_auto_num_workers():
    """Two more than there are CPUs: a flow's test works half of its time and waits the other."""
    return (os.cpu_count() or 1) + 2


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_configure(config):
    """Workers are forked from one process, and ask it for others."""
    if config.getvalue("dist") != "no" and not hasattr(config, "workerinput"):
        from tests import warm

        warm.share()
    else:
        import torch  # for seconds, which who runs no test does not wait for

        torch.set_num_threads(1)


def pytest_xdist_setupnodes(config, specs):
    """See ``forked.py``."""
    python = shlex.join([sys.executable, str(Path(__file__).with_name("forked.py"))])
    for spec in specs:
        if spec.popen:
            spec.python = python


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """What was imported stays, and what tests of earlier files have left: to look through all of
    it for garbage takes 0.4 s, and trainings and plans do so each time."""
    if item.path != _begun.get("file"):
        _begun["file"] = item.path
        if item.nodeid.startswith(SERVERLESS) and "prefect_server" in sys.modules:
            sys.modules["prefect_server"].stop()  # which is a tenth of a CPU when nobody asks it
        gc.collect()
        gc.freeze()


def pytest_unconfigure():
    for name in ("prefect_server", "tests.warm"):
        if name in sys.modules:
            sys.modules[name].stop()
    shutil.rmtree(SESSION, ignore_errors=True)
