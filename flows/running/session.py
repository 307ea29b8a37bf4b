"""What every flow shares: one session over Prefect, Ray, MLflow and DVC."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import deployment
from prefect.states import State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from flows.running.datasets import read_by
from flows.running.interrupted import close_interrupted
from flows.running.naming import completed, link_runs, name_run, title_of_day
from flows.running.planned import Begun, say_plan
from flows.running.progress import ProgressArtifacts
from flows.running.recording import record_published
from flows.running.refused import in_a_line
from flows.running.turn import live, log, turn
from infra import settings as environment
from infra.cluster import calls
from infra.cluster.compute import check_room, cluster
from infra.recipe.schema import Recipe, resolve
from infra.services.processes import end_orphans
from infra.settings import Settings
from infra.tracking.registry import Registry
from infra.tracking.runs import Run, Tracker
from infra.versioning.versions import Versions, code_version, remote_faults, remote_of
from tasks.engine.headline import write_headline
from tasks.engine.reporting import Recorder
from tasks.engine.sources import CODE
from tasks.engine.stage import Session, Stage
from tasks.engine.workspace import Workspace
from tasks.living.lineage import (
    check_built_upon,
    save,
    settle,
    with_lineage,
    with_parents,
)
from tasks.methods import METHODS, stages_of
from tasks.pipeline import dvc_yaml, params_yaml
from tasks.planning.made import EVERYTHING, Aim
from tasks.release.history import catch_up, led_experts
from tasks.release.register import Registrar
from tasks.release.versions import compressed_name
from upcycle_core.errors import Fault, InputError, raise_faults

# A killed flow leaves the Prefect server that it had brought along.
SERVER = "prefect.server.api.server:create_app"
ORPHAN_SECONDS = 5.0
# Stages wait for Ray in threads. (Prefect's annotation of task_runner admits no runner of its own.)
THREADS: Any = ThreadPoolTaskRunner(max_workers=32)

STOP_SECONDS = 2.0
"""How long stages are waited for as the session ends early: they look at it twice a second."""

COMMIT_SECONDS = 60.0
"""What is published within that time goes into one call of DVC, which takes a second to start."""


class FlowSession:
    """A recipe at work, with everything a flow needs.

    Args:
        settings: Where services and databases are.
        session: What stages see.
        run: The flow's MLflow run.
        registry: The model registry.
        versions: The workspace's DVC project.
        title: What its runs are called so far.
        link: Markdown that leads to the flow's run in Prefect; empty where no server stays.
    """

    def __init__(
        self,
        settings: Settings,
        session: Session,
        *,
        run: Run,
        registry: Registry,
        versions: Versions,
        title: str = "",
        link: str = "",
    ) -> None:
        self.settings, self.stages = settings, session
        self.run, self.registry, self.versions = run, registry, versions
        self.registrar = Registrar(session, registry, versions, run)
        self.recipe, self.workspace = session.recipe, session.workspace
        self.title, self.link = title, link
        self.began = time.time()
        self._submitted: list[Any] = []
        self._makers: dict[str, Any] = {}
        self._before: dict[str, set[str]] = {}
        self._committer = ThreadPoolExecutor(max_workers=1)
        self._commits: list[Future[None]] = []
        self._committed = time.monotonic()
        self._published: dict[str, str] = {}
        self._seen: set[str] = set()

    def adopt(self, recipe: Recipe) -> None:
        """Go on with a recipe whose lineage has changed, and let the workspace know it."""
        if recipe.lineage is not None:
            save(recipe.lineage, self.workspace)
        self.recipe = self.stages.recipe = recipe
        prepare(self.versions, recipe)

    def ensure(self, *stages: Stage, only: Collection[str] | None = None) -> None:
        """Bring stages up to date, one Prefect task an item, and let DVC record them.

        What lies outside the workspace is looked at once: text that arrives during a flow is the
        next one's.

        Args:
            *stages: One, or several that read nothing of each other: they run at the same time.
            only: Domains, baselines or models to run them for, of those they have; all by default.

        Raises:
            InputError: With the faults of all items of all stages; or what has been made lacks what
                the method asks for before one of them.
        """
        looks = METHODS[self.recipe.method].before()
        names = [stage.name for stage in stages if stage.name in looks]
        raise_faults(fault for name in names for fault in looks[name](self.stages))
        if "parents" in [stage.name for stage in stages]:
            self._continue_experts()
        items: dict[str, list[str]] = {}
        for stage in stages:
            asked = (item for item in stage.items(self.recipe) if only is None or item in only)
            items[stage.name] = [i for i in asked if stage.label(i) not in self._seen]
            if stage.always:
                self._seen.update(map(stage.label, items[stage.name]))
        _wait([future for stage in stages for future in self._submit(stage, items[stage.name])])
        for stage in stages:
            self._record(stage, items[stage.name])

    def _continue_experts(self) -> None:
        """Name a parent for each expert whose text is new: in whatever flow, once there is a
        lineage, none is trained from what an earlier one was continued from."""
        if self.recipe.lineage is not None:
            check_built_upon(self.stages)
            name = self.recipe.registered_name
            catch_up(self.registry, name)  # the experts of one that a person took back do not lead
            led = led_experts(self.registry, name, recipe=self.recipe.name)
            recipe = with_parents(self.recipe, self.workspace, led=led)
            if recipe != self.recipe:
                self.adopt(recipe)

    def _submit(self, stage: Stage, items: Sequence[str]) -> list[Any]:
        """One Prefect task an item; Prefect must not look into what other stages are changing."""
        run: Any = in_a_line(stage.ensure)
        step = task(name=stage.name, cache_policy=NO_CACHE, persist_result=False)(run)
        futures = {
            stage.artifact(item): step.with_options(
                task_run_name=f"{stage.name} {item}".rstrip()
            ).submit(quote(self.stages), item, wait_for=self._makers_of(stage, item))
            for item in items
        }
        self._submitted += futures.values()
        self._makers |= futures
        return list(futures.values())

    def _makers_of(self, stage: Stage, item: str) -> list[Any]:
        """The tasks that have made what an item reads: Prefect draws the run's graph by them.

        Those whose work another of them has read already are left out, or nobody could read it.
        """
        names = [Path(name) for name in stage.inputs(self.recipe, item)]
        places = {str(place) for name in names for place in (name, *name.parents)}
        read = self._makers.keys() & places
        earlier = {artifact for own in read for artifact in self._before[own]}
        self._before[stage.artifact(item)] = read | earlier
        return [self._makers[artifact] for artifact in sorted(read - earlier)]

    def _record(self, stage: Stage, items: list[str]) -> None:
        """Let DVC record what a stage has published."""
        self._published.update({stage.label(d): stage.artifact(d) for d in items})
        if time.monotonic() - self._committed >= COMMIT_SECONDS:
            self._submit_commit()

    def _submit_commit(self) -> None:
        self._committed = time.monotonic()
        published, self._published = self._published, {}
        self._commits.append(
            self._committer.submit(record_published, self.workspace, self.versions, published)
        )

    def finish(self) -> None:
        """All is made: build upon it from now on, let DVC record it, push where a remote is named.

        Recorded is also what a flow that was stopped has published of domains that this one did not
        look at: the model is made of it.
        """
        settled = settle(self.recipe, self.workspace)
        if settled != self.recipe:
            self.adopt(settled)
        for stage in stages_of(self.recipe):
            for item in stage.items(self.recipe) if stage.by_domain else ():
                if self.workspace.record(artifact := stage.artifact(item)) is not None:
                    self._published[stage.label(item)] = artifact
        self._submit_commit()
        for commit in self._commits:
            commit.result()
        self._commits.clear()
        if self.recipe.versions.remote is not None:
            self.versions.push(remote_of(self.recipe.versions.remote, self.settings.home))

    def completed(self, said: str, result: Any = None) -> State:
        """The state in which the flow ends: it, and both of its runs, say what came of it.

        Args:
            said: What came of it.
            result: What the flow returns to whoever calls it.
        """
        return completed(self.title, said, result, run=self.run)

    def close(self) -> None:
        """Let go of all threads: of stages still at work, before their Ray ends, and of DVC's."""
        self.stages.stopping.set()
        calls.end()
        wait([future.wrapped_future for future in self._submitted], STOP_SECONDS)
        self._committer.shutdown(cancel_futures=True)

    def timings(self) -> dict[str, Any]:
        """Wall time so far, and the time in which pieces ran (union of intervals), in seconds."""
        fresh = {
            stage: [span for span in spans if span[0] >= self.began]
            for stage, spans in self.stages.spent.items()
        }
        return {
            "wall": time.time() - self.began,
            "pieces": covered([span for spans in fresh.values() for span in spans]),
            "stages": {stage: covered(spans) for stage, spans in fresh.items()},
        }


@contextmanager
def open_session(
    flow_name: str,
    recipe: Recipe,
    *,
    is_held: bool = False,
    begun: Begun = with_lineage,
    aim: Aim = EVERYTHING,
) -> Iterator[FlowSession]:
    """Hold the workspace, start Ray, open the MLflow run; put everything away afterwards.

    The recipe goes on with the lineage of the workspace's model, where that has one.

    Args:
        flow_name: The flow's.
        recipe: Its recipe.
        is_held: Whether this process holds the workspace already.
        begun: The recipe that the flow will build, which is planned.
        aim: What it brings up to date of that.

    Raises:
        Held: If another flow holds the workspace for longer than the recipe waits.
    """
    settings = environment.configure()
    home = {"PREFECT_HOME": str(settings.prefect_home)}
    workspace = Workspace(settings.home / recipe.name)
    live(workspace.root.parent, workspace.root.name)
    end_orphans(command=SERVER, environment=home, owner=environment.OWNER, grace=ORPHAN_SECONDS)
    with nullcontext() if is_held else turn(workspace, f"the flow {flow_name}", recipe):
        close_interrupted(workspace, recipe.registered_name, compressed_name(recipe))
        recipe = with_lineage(recipe, workspace)
        if deployment.id is not None:  # a command has said it before there was a run
            say_plan(begun(recipe, workspace), settings, log, aim=aim)
        versions = _versions(recipe, workspace)
        title = title_of_day(recipe.name)
        name_run(title, tags=(recipe.name,))
        tracker, tags = Tracker(settings, f"upcycle-{recipe.name}"), _tags_of_code()
        with (
            tracker.start_run(title, workspace=workspace.root, tags=tags, source=flow_name) as run,
            pieces_run(settings, recipe, workspace),
        ):
            check_room(recipe.compute)
            run.log_params(resolve(recipe))
            link = link_runs(settings, recipe.name, run)
            run.describe(link)
            progress = ProgressArtifacts(recipe.name)
            record = _recording(tracker, run, workspace)
            session = Session(recipe, workspace, log=log, record=record, show=progress)
            flow_session = FlowSession(
                settings,
                session,
                run=run,
                registry=Registry(settings),
                versions=versions,
                title=title,
                link=link,
            )
            with calls.heeding(session.check_time), closing(flow_session):
                yield flow_session
                _record_history(flow_session, flow_name)
                progress.clear()


def _tags_of_code() -> dict[str, str]:
    """What a run says of the code; MLflow's pages show, and compare by, a tag of their own."""
    commit = code_version(CODE)
    return {"git.commit": commit, "mlflow.source.git.commit": commit.partition("-")[0]}


def pieces_run(
    settings: environment.Settings, recipe: Recipe, workspace: Workspace
) -> AbstractContextManager[None]:
    """Where a flow's pieces run; of a dashboard its log says where it is."""
    dashboard = log if recipe.compute.dashboard else None
    cpus = recipe.compute.cpus
    return cluster(settings, cpus, CODE, workspace=workspace.root, dashboard=dashboard)


def _record_history(session: FlowSession, flow_name: str) -> None:
    """Keep what came of a run that went well among the workspace's small files."""
    write_headline(session.recipe, session.workspace)
    if said := session.versions.history.commit(f"{flow_name} {session.recipe.name}"):
        log(f"the workspace's Git history lacks this run: {said}")


def _versions(recipe: Recipe, workspace: Workspace) -> Versions:
    """The workspace's DVC project, with a remote that DVC can speak to."""
    home = workspace.root.parent
    raise_faults(remote_faults("versions.remote", recipe.versions.remote, home))
    versions = Versions(workspace.root)
    prepare(versions, recipe)
    return versions


def prepare(versions: Versions, recipe: Recipe) -> None:
    """Write the recipe's pipeline into its workspace, for DVC."""
    params = params_yaml(recipe, versions.root)
    versions.prepare(pipeline=dvc_yaml(recipe), params=params)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _recording(
    tracker: Tracker, parent: Run, workspace: Workspace
) -> Callable[[str, Mapping[str, Any]], AbstractContextManager[Recorder | None]]:
    @contextmanager
    def record(label: str, made_from: Mapping[str, Any]) -> Iterator[Recorder]:
        with tracker.start_run(label, parent=parent) as run:
            run.log_params({"params": made_from["params"], "inputs": made_from["inputs"]})
            run.log_inputs(read_by(workspace, made_from["inputs"]))
            began = time.time()
            yield run
            run.log_metrics({"seconds": time.time() - began})

    return record


def _wait(futures: list[Any]) -> None:
    """Wait for all; raise the faults of all that found bad input, or else the first error."""
    faults: list[Fault] = []
    errors: list[BaseException] = []
    for future in futures:
        try:
            future.result()
        except InputError as error:
            faults += error.faults
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if faults:
        raise InputError(*dict.fromkeys(faults))
