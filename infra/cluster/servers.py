"""Which servers a local Ray starts: what pieces need, and no more. Checked with Ray 2.60.

Beside what computes, Ray starts an autoscaler, a forwarder of workers' output and the process of a
dashboard, whether or not anybody has asked for one. Each is a Python of its own, and a flow waits
for them; and for the servers of each machine's agent, which answer that dashboard alone: where Ray
is installed without it, the agent has none, and Ray is there two seconds earlier. No parameter of
``ray.init`` leaves them out; what does is no public interface. ``USES`` is as in
``infra.cluster.private``, which imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ray._private import node, parameter, utils

USES = {
    "ray._private:node": "holds what starts them",
    "ray._private:parameter": "holds what it is told",
    "ray._private.node:Node.start_api_server": "starts a dashboard's process, even without one",
    "ray._private.node:Node.start_head_processes": "where that and the autoscaler are started",
    "ray._private.parameter:RayParams": "has a field for each of the other two",
    "ray._private:utils": "holds what says whether a dashboard is installed",
    "ray._private.services:start_raylet": "asks that for the agent, and tells it",
    "ray._private.utils:get_dashboard_dependency_error": "says whether a dashboard is installed",
    "ray._private.worker:init": "makes that of a local Ray",
}
"""{module:name: what it is for}."""


@contextmanager
def few_servers() -> Iterator[None]:
    """A local Ray that starts in here has no autoscaler, forwarder of output, or dashboard."""
    module: Any = parameter
    kind: Any = node.Node
    helpers: Any = utils
    params, start = module.RayParams, kind.start_api_server
    error = helpers.get_dashboard_dependency_error
    module.RayParams = partial(params, no_monitor=True, include_log_monitor=False)
    kind.start_api_server = _no_dashboard
    helpers.get_dashboard_dependency_error = _not_installed
    try:
        yield
    finally:
        module.RayParams, kind.start_api_server = params, start
        helpers.get_dashboard_dependency_error = error


def _not_installed() -> ImportError:
    return ImportError("nobody has asked for a dashboard")


def _no_dashboard(self: Any, **_: Any) -> None:
    self._webui_url = None
