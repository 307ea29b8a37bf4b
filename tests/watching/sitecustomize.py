"""On the path of every process that a test starts: counts calls of core functions, and pauses.

Python imports this module by itself, in Ray's workers and DVC's stages too, so that what is
counted are calls and not lines of a log.

``UPCYCLE_TEST_CALLS``: file that each watched call adds its name to.
``UPCYCLE_TEST_READS``: file that each look into weights adds a line to: the process's program, the
file of weights, and how it was read; headers are none.
``UPCYCLE_TEST_WARM``: socket of the process that Ray's workers and DVC are forked from, see
``warm.py``.
``UPCYCLE_TEST_PAUSE``: ``WHAT:N`` stops a piece for good once its progress on WHAT passes N; the
file ``UPCYCLE_TEST_CALLS.paused`` then appears.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys
import time

WATCHED = {
    "upcycle_core.corpora.documents": ("write_documents",),
    "upcycle_core.corpora.tokenizer": ("train_tokenizer",),
    "upcycle_core.corpora.shards": ("write_corpus",),
    "upcycle_core.training.trainer": ("train",),
    "upcycle_core.backbone.average": ("write_backbone",),
    "upcycle_core.dume.shared_head": ("final_moments", "fitted_head"),
    "upcycle_core.dume.attention": ("merge_attention",),
    "upcycle_core.dume.repair": ("repair_expert",),
    "upcycle_core.dume.statistics": ("domain_statistics",),
    "upcycle_core.dume.routed": ("repair_routed",),
    "upcycle_core.dume.router": ("solve_routers",),
    "upcycle_core.moe.assemble": ("assemble",),
    "upcycle_core.given.adapter": ("merge_adapter",),
    "upcycle_core.given.gguf_file": ("write_gguf",),
    "upcycle_core.evaluation.text.pieces": (
        "evaluate_checkpoint",
        "evaluate_moe",
        "evaluate_stitched",
    ),
    "upcycle_core.evaluation.tasks.adapter": ("evaluate_tasks",),
    "upcycle_core.symphony.moments": ("collect_moments",),
    "upcycle_core.ders.compress": ("compress",),
    "upcycle_core.simoe.train": ("train_simoe",),
    "infra.cluster.progress": (),
}


def counted(function, name):
    @functools.wraps(function)
    def call(*args, **kwargs):
        with open(os.environ["UPCYCLE_TEST_CALLS"], "a") as file:
            file.write(f"{name}\n")
        return function(*args, **kwargs)

    return call


def pausing(advance):
    what, _, count = os.environ["UPCYCLE_TEST_PAUSE"].partition(":")

    @functools.wraps(advance)
    def call(self, amount=1, **shown):
        advance(self, amount, **shown)
        if self.what.startswith(what) and self.done >= int(count):
            open(os.environ["UPCYCLE_TEST_CALLS"] + ".paused", "w").close()
            while True:  # a signal that comes before a sleep begins is heard after it
                time.sleep(0.05)

    return call


class Watcher(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds watched modules where they are, and wraps their functions once they are loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in WATCHED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        self.loaders[fullname] = spec.loader
        spec.loader = self
        return spec

    loaders: dict = {}

    def create_module(self, spec):
        return self.loaders[spec.name].create_module(spec)

    def exec_module(self, module):
        self.loaders[module.__name__].exec_module(module)
        for name in WATCHED[module.__name__]:
            setattr(module, name, counted(getattr(module, name), name))
        if module.__name__ == "infra.cluster.progress" and "UPCYCLE_TEST_PAUSE" in os.environ:
            module.FileProgress.advance = pausing(module.FileProgress.advance)


def note(path, how):
    with open(os.environ["UPCYCLE_TEST_READS"], "a") as file:
        file.write(f"{os.path.basename(sys.argv[0])} {path} {how}\n")


def noting(event, args):
    """Files that Python opens for reading: to hash, scan or copy them."""
    if event == "open" and isinstance(args[0], (str, os.PathLike)):
        path, mode = os.fspath(args[0]), args[1]
        is_weights = str(path).endswith(".safetensors") or "/files/md5/" in str(path)
        if is_weights and mode is not None and "r" in mode:
            note(path, "opened")


class NotedTensors:
    """``safetensors.safe_open``, whose code is not Python's: it maps files."""

    def __init__(self, path, *args, **settings):
        self.path, self.file = path, NotedTensors.real(path, *args, **settings)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def get_tensor(self, name):
        note(self.path, f"tensor {name}")
        return self.file.get_tensor(name)


def fork_instead(command):
    """Let be forked what Python has been started for, and end as it ends: a worker of Ray's, DVC.

    Killed, it ends before what was forked does; and the command line of that is not its own. So
    nothing that a test kills is forked.

    Where a worker's environment needs something, Ray starts Python for that, and once more for
    the worker; as it does here where the environment needs more than variables.
    """
    variables = {}
    if command[0].endswith(SETUP):
        names = ("--serialized-runtime-env-context=", "--language=")
        values = [
            next((w.removeprefix(n) for w in command if w.startswith(n)), None) for n in names
        ]
        command = [word for word in command[1:] if not word.startswith(names)]
        context = json.loads(values[0] or "{}")
        variables = context.get("env_vars", {})
        if (
            values[1] != "PYTHON"
            or command[0].startswith("-")
            or context.get("py_executable", sys.executable) != sys.executable
            or context.get("command_prefix")
            or context.get("override_worker_entrypoint")
            or "$" in "".join(variables.values())
        ):
            del os.environ["UPCYCLE_TEST_WARM"]  # not the worker either, which Ray starts next
            return
    sys.path.append(os.path.join(os.path.dirname(__file__), os.pardir))
    from warm import ask

    env, outputs = {**os.environ, **variables}, (sys.stdout, sys.stderr)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(env.pop("UPCYCLE_TEST_WARM"))  # what is forked asks for nobody
        try:
            code = ask(server, command, cwd=os.getcwd(), env=env, outputs=outputs)
        except OSError:  # it may have been forked: there must not be another
            code = 1
    os._exit(code & 0xFF)


SETUP, WORKER = (
    os.path.join("ray", "_private", "workers", f"{name}_worker.py") for name in ("setup", "default")
)
DVC = os.path.join("infra", "versioning", "dvc_command.py")
if "UPCYCLE_TEST_WARM" in os.environ:
    import json
    import socket

    program = next((word for word in sys.orig_argv[1:] if word != "-P"), "")
    if program.endswith((SETUP, WORKER, DVC)):
        fork_instead(sys.orig_argv[1:])
if "UPCYCLE_TEST_READS" in os.environ:
    import safetensors

    NotedTensors.real = safetensors.safe_open
    safetensors.safe_open = NotedTensors
    sys.addaudithook(noting)
if "UPCYCLE_TEST_CALLS" in os.environ:
    sys.meta_path.insert(0, Watcher())
