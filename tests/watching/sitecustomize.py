"""On the path of every process that a test starts: counts calls of core functions, and pauses.

Python imports this module by itself, in Ray's workers and DVC's stages too, so that what is
counted are calls and not lines of a log.

``UPCYCLE_TEST_CALLS``: file that each watched call adds its name to.
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
            time.sleep(600)

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


if "UPCYCLE_TEST_CALLS" in os.environ:
    sys.meta_path.insert(0, Watcher())
