"""Which MLflow runs and versions may go, on a real database."""

import subprocess
import sys
from threading import Thread

import pytest
import yaml
from databases import home_with_database
from mlflow import MlflowClient
from mlflow.entities import ViewType

from infra.cluster.calls import heeding
from infra.recipe.schema import KeepConfig
from infra.tracking import copies
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.retention import Records
from infra.tracking.runs import Tracker
from upcycle_core.errors import Fault, InputError

ONE = KeepConfig(versions=1, runs=1)
READER = """
import sys
from infra.settings import read
from infra.tracking import copies
from infra.tracking.registry import Registry
registry = Registry(read({"UPCYCLE_HOME": sys.argv[1]}))
print(copies.in_place(registry.referenced(sys.argv[2]), registry), flush=True)
sys.stdin.read()
"""


class Place:
    """An experiment and a registered model of one name, in a database that tests share."""

    def __init__(self, home, name):
        self.settings = home_with_database(home)
        self.name = name
        self.tracker = Tracker(self.settings, name)
        self.registry = Registry(self.settings)
        self.client = MlflowClient(self.settings.mlflow_tracking_uri)
        self.checkpoint = home / "checkpoint"
        self.checkpoint.mkdir(exist_ok=True)
        (self.checkpoint / "config.json").write_text("{}")

    def run(self, name="flow", **options):
        with self.tracker.start_run(name, **options) as run:
            run.log_text("x", "x.txt")
        return run

    def version(self, run, name=None, params=None):
        made = Registration(tags={"upcycle.recipe": "r"}, params=params or {})
        return self.registry.register(name or self.name, self.checkpoint, made, run=run)

    def records(self):
        return Records(self.settings, self.name)

    def past(self):
        names = (self.name, f"{self.name}-ders")
        return self.records().past(ONE, names, recipe="demo", ways_back=ways_back)


def ways_back(versions):
    """Tagged here, where no champion is known."""
    return {int(v.tags["before"]) for v in versions if v.aliases and "before" in v.tags}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def place(home, request):
    return Place(home, request.node.name[5:])


def test_runs_that_made_or_measured_a_kept_version_stay_with_their_families(place):
    maker, judge, idle, _newest = (place.run(name) for name in ("a", "b", "c", "d"))
    stage = place.run("stage", parent=maker)
    step = place.run("step", parent=stage)
    idle_stage = place.run("stage", parent=idle)
    version = place.version(step)
    place.registry.add_metrics(version, {"task": 1.0}, run=judge)
    with place.tracker.start_run("at work"):
        assert place.past().runs == (idle_stage.id, idle.id)


def test_deleting_a_run_takes_its_files_and_no_other_run_in_the_bin(place):
    binned, gone = place.run(), place.run()
    place.client.delete_run(binned.id)
    records = place.records()
    assert len(records.run_files(gone.id)) == 1
    folder = records.run_files(gone.id)[0].parent.parent
    records.delete_run(gone.id)
    assert not folder.exists()
    found = place.client.search_runs([gone.experiment_id], run_view_type=ViewType.ALL)
    assert [run.info.run_id for run in found] == [binned.id]


def test_versions_of_other_names_of_the_same_flows_are_counted_by_name(place):
    run = place.run()
    main = [place.version(run) for _ in range(3)]
    other = [place.version(run, f"{place.name}-ders") for _ in range(2)]
    place.registry.set_alias(main[0], "champion")
    assert [v.reference for v in place.past().versions] == [main[1].reference, other[0].reference]
    assert {v.reference for v in place.past().kept} == {
        v.reference for v in (main[0], main[2], other[1])
    }


def test_a_version_that_another_process_reads_stays_with_its_model_until_that_ends(place):
    read, late, _newest = [place.version(place.run()) for _ in range(3)]
    command = [sys.executable, "-c", READER, str(place.settings.home), read.reference]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as reader:
        folder = reader.stdout.readline().strip()
        assert folder == str(place.registry.place(read.reference))
        past = place.past()
        assert [v.reference for v in past.versions] == [late.reference]
        assert read.reference in [v.reference for v in past.kept]
        assert past.models == ()
        assert place.records().delete_version(read) is False  # it began after the look
        assert place.registry.place(read.reference) is not None
        reader.stdin.close()
    assert [v.number for v in place.past().versions] == [1, 2]
    assert place.records().delete_version(read) is True
    with pytest.raises(InputError, match="not in the registry"):
        copies.in_place(read, place.registry)


def test_a_neighbour_s_versions_are_left_alone(place):
    with Tracker(place.settings, "another").start_run("flow") as theirs:
        pass
    for _ in range(3):
        place.version(theirs)
    place.run()
    assert place.past().versions == ()
    assert place.past().models == ()


def test_the_champion_before_another_recipe_s_champion_stays(place):
    ours = [place.version(place.run()) for _ in range(3)]
    with Tracker(place.settings, "other recipe").start_run("flow") as run:
        theirs = place.version(run)
    place.registry.set_alias(theirs, "champion")
    place.registry.set_tags(theirs, {"before": str(ours[0].number)})
    assert [v.reference for v in place.past().versions] == [ours[1].reference]


def test_versions_of_a_renamed_experiment_are_told_by_their_recipe(place):
    """Its runs stay, and a version of another recipe is left alone."""
    run = place.run()
    ours = [place.version(run, params={"name": "demo"}) for _ in range(3)]
    small = place.version(run, f"{place.name}-ders", params={"name": "demo"})
    place.version(run, params={"name": "another"})
    place.registry.set_alias(ours[0], "champion")
    place.client.rename_experiment(run.experiment_id, f"{place.name}, renamed")
    for _ in range(2):
        past = place.past()
        kept = {v.reference for v in (ours[0], ours[2], small)}
        assert {v.reference for v in past.kept} == kept
        assert [v.reference for v in past.versions] == [ours[1].reference]
        assert (past.runs, past.models, past.is_unknown) == ((), (), False)
        Tracker(place.settings, place.name)  # the next flow makes the experiment anew


def test_versions_that_nobody_can_tell_are_said_to_be_so(place):
    assert not place.past().is_unknown  # none is registered
    run = place.run()
    version = place.version(run)
    assert not place.past().is_unknown
    place.client.rename_experiment(run.experiment_id, f"{place.name}, renamed")
    past = place.past()
    assert (past.kept, past.versions, past.is_unknown) == ((), (), True)
    place.records().delete_version(version)
    assert not place.past().is_unknown


def test_a_version_whose_model_was_deleted_by_hand_stays(place):
    run = place.run()
    versions = [place.version(run) for _ in range(3)]
    place.client.delete_logged_model(versions[0].model_id)
    past = place.past()
    assert [v.number for v in past.versions] == [2]
    assert [v.number for v in past.kept] == [1, 3]


def test_the_champion_before_stays_for_a_rollback(place):
    run = place.run()
    versions = [place.version(run) for _ in range(4)]
    place.registry.set_alias(versions[2], "champion")
    place.registry.set_tags(versions[2], {"before": "2"})
    assert [version.number for version in place.past().versions] == [1]
    assert [version.number for version in place.past().kept] == [2, 3, 4]


def test_a_version_that_is_being_made_champion_is_not_deleted(place):
    version, deleted = place.version(place.run()), []
    tidy = Thread(target=lambda: deleted.append(place.records().delete_version(version)))
    with place.registry.alone(place.name):
        tidy.start()
        tidy.join(1)
        place.registry.set_alias(version, "champion")
    tidy.join()
    assert deleted == [False]


def test_a_version_that_somebody_deletes_meanwhile_ends_no_tidying(place):
    versions = [place.version(place.run()) for _ in range(2)]
    (found,) = place.past().versions
    files = place.records().model_files(found.model_id)
    place.client.delete_model_version(place.name, str(found.number))
    assert place.records().delete_version(found)
    assert files
    assert not any(file.exists() for file in files)
    assert [v.number for v in place.past().kept] == [v.number for v in versions[1:]]


def test_a_model_that_somebody_promoted_or_registered_elsewhere_stays(place):
    """Under the other name it may be what everybody uses."""
    made = [place.version(place.run()) for _ in range(4)]
    place.client.copy_model_version(made[0].reference, f"{place.name}-production")
    place.client.create_registered_model(f"{place.name}-shop")
    for version in made[1], made[1], made[2]:
        source = f"models:/{version.model_id}"
        place.client.create_model_version(f"{place.name}-shop", source=source)
    place.client.delete_model_version(f"{place.name}-shop", "3")
    past = place.past()
    assert [v.reference for v in past.versions] == [made[2].reference]
    assert [v.number for v in past.kept] == [4, 1, 2]
    place.client.delete_model_version(place.name, "1")  # by hand: its copy has its model
    assert place.past().models == ()
    records = place.records()
    for version in made[1], made[2]:
        files = records.model_files(version.model_id)
        assert records.delete_version(version)
        assert all(file.exists() == (version is made[1]) for file in files)


def test_who_waits_for_another_command_waits_no_longer_than_a_flow_may_work(place):
    def late():
        raise InputError(Fault("compute.limit_hours", 1, "the flow has worked for longer"))

    refused = pytest.raises(InputError, match="limit_hours")
    with place.registry.alone(place.name), heeding(late), refused, place.registry.alone(place.name):
        pytest.fail("it is held")
    with heeding(late), place.registry.alone(place.name):
        pass  # who need not wait is done


def test_a_version_that_another_recipe_names_by_its_number_stays(place, home):
    run = place.run()
    versions = [place.version(run) for _ in range(13)]
    workspace = home / "another"
    workspace.mkdir()
    given = {"law": {"expert": versions[11].reference}, "art": {"expert": versions[1].reference}}
    (workspace / "params.yaml").write_text(yaml.safe_dump({"domains": given}))
    assert {version.number for version in place.past().kept} == {2, 12, 13}
    assert {version.number for version in place.past().versions} == {1, *range(3, 12)}
