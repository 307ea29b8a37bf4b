"""The files of `infra/services/deploy`, each checked by the schema of the program that reads it."""

import importlib
import inspect
import json
import shlex
import subprocess
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import click
import jsonschema
import pytest
import ray
import yaml
from prefect.client.schemas.schedules import CronSchedule
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_command

from flows.make import make
from infra.recipe.reading import load_recipe as load_as_it_is
from infra.recipe.schema import resolve
from infra.services import commands, standing
from infra.services import deployments as module
from infra.services.api import DeploymentError
from infra.services.deployments import deploy, offered
from infra.services.pools import Pool
from infra.settings import REPOSITORY, read
from infra.tracking import asgi
from tasks import offered as tasks_offered
from tasks.methods import METHODS
from tasks.recipes import load_recipe
from upcycle_core.errors import InputError

DEPLOY = REPOSITORY / "infra" / "services" / "deploy"


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def ray_cluster():
    return yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())


def faults_of(content, schema):
    """Where `content` departs from `schema`."""
    validator = jsonschema.validators.validator_for(schema)
    found = validator(schema).iter_errors(content)
    return [f"{error.json_path}: {error.message}" for error in found]


def commands_of(service):
    """The program calls of a service, as lists of words."""
    command = service.get("command", "")
    text = command if isinstance(command, str) else command[-1]
    calls = text.replace("&& ", "\n").split("\n")
    return [shlex.split(call.removeprefix("exec ")) for call in calls]


def parse(program, words):
    """What a program makes of its arguments, without running it; unknown ones are an error."""
    *groups, command = [word for word in words if not word.startswith("-")][: depth(program, words)]
    for name in groups:
        program = program.commands[name]
    options = words[words.index(command) + 1 :]
    return program.commands[command].make_context(command, options, resilient_parsing=False).params


def depth(program, words):
    """How many words name the command."""
    count = 0
    while isinstance(program, click.Group):
        program = program.commands[words[count]]
        count += 1
    return count


def test_compose_accepts_its_file(compose):
    schemas = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    assert not faults_of(compose, schema)
    (fault,) = faults_of({"services": {"a": {"image": "x", "port": ["1:1"]}}}, schema)
    assert "port" in fault


def test_containers_are_published_on_loopback_only_and_wait_for_what_they_need(compose):
    services = compose["services"]
    assert set(services) == {"postgres", "prefect", "mlflow", "ray-head", "ray-worker", "worker"}
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000"]
    for service in services.values():
        for needed in service.get("depends_on", {}):
            assert "healthcheck" in services[needed]
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in compose["volumes"]


def test_containers_share_the_workspaces_and_the_databases_are_on_postgresql(compose):
    services = compose["services"]
    homes = {name for name, s in services.items() if "home:/home/upcycle" in s["volumes"]}
    assert homes == set(services) - {"postgres"}
    image = services["prefect"]["build"]["dockerfile_inline"]
    assert "UPCYCLE_HOME=/home/upcycle " in image
    places = {
        services["prefect"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"],
        services["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"],
    }
    assert places == {
        "postgresql+asyncpg://upcycle:${POSTGRES_PASSWORD}@postgres/prefect",
        "postgresql://upcycle:${POSTGRES_PASSWORD}@postgres/mlflow",
    }
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert "'.[pipeline,postgres,s3]'" in image
    assert any("psycopg2" in need for need in extras["optional-dependencies"]["postgres"])


def test_no_secret_stands_in_a_file_or_a_command(compose):
    text = (DEPLOY / "compose.yaml").read_text()
    assert "POSTGRES_PASSWORD: ${POSTGRES_PASSWORD:?" in text
    assert "RAY_AUTH_TOKEN: ${RAY_AUTH_TOKEN:?" in text
    for service in compose["services"].values():
        words = str(service.get("command", "")).replace("${MLFLOW_PUBLIC_HOST:-localhost}", "")
        assert "$" not in words
    for name in (".gitignore", ".dockerignore"):
        ignored = (REPOSITORY / name).read_text().split()
        assert {".env", "ray-token"} <= {entry.removeprefix("/") for entry in ignored}


def test_containers_call_their_programs_with_options_that_exist(compose):
    from mlflow.cli import cli as mlflow  # takes two seconds

    calls = [words for service in compose["services"].values() for words in commands_of(service)]
    needed = ["python", "-m", asgi.__name__]  # takes what `mlflow` takes
    calls = [["mlflow", *words[3:]] if words[:3] == needed else words for words in calls]
    ours = [words for words in calls if words and words[0] in ("ray", "mlflow")]
    assert [words[0] for words in ours] == ["mlflow", "ray", "ray"]
    server, head, other = [
        parse({"ray": ray_command, "mlflow": mlflow}[words[0]], words[1:]) for words in ours
    ]
    assert server["host"] == "0.0.0.0"
    assert head["head"]
    assert head["port"] == 6379
    assert head["num_cpus"] == 0  # or the machine would be counted twice
    assert (other["address"], other["num_cpus"]) == ("ray-head:6379", None)


def test_flows_in_containers_use_the_ray_that_runs_there(compose):
    worker = compose["services"]["worker"]["environment"]
    assert worker["RAY_ADDRESS"] == "ray://ray-head:10001"
    rays = [compose["services"][name] for name in ("ray-head", "ray-worker", "worker")]
    assert all(service["environment"]["RAY_AUTH_MODE"] == "token" for service in rays)


def test_ray_accepts_the_cluster_file(ray_cluster):
    schema = resources.files(ray) / "autoscaler" / "ray-schema.json"
    assert not faults_of(ray_cluster, json.loads(schema.read_text()))
    validate_config(prepare_config(ray_cluster))
    assert ray_cluster["max_workers"] == len(ray_cluster["provider"]["worker_ips"])


def test_the_cluster_file_starts_ray_with_options_that_exist_and_a_token(ray_cluster):
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        _, start = ray_cluster[key]
        assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/shared/upcycle/ray-token" in start
        program, options = start.split(".venv/bin/ray ")
        found = parse(ray_command, shlex.split(options))
        assert program.endswith("/shared/upcycle/")
        assert found["head"] == (key == "head_start_ray_commands")


def test_every_deployment_names_files_that_exist_and_the_pool_that_up_starts():
    content = yaml.safe_load((DEPLOY / "prefect.yaml").read_text())
    for deployment in content["deployments"]:
        for path in deployment["parameters"].get("recipe", "").split():
            assert (REPOSITORY / path).is_file()
        assert (REPOSITORY / deployment["entrypoint"].partition(":")[0]).is_file()
        assert deployment["work_pool"]["name"] == "local"
        # A slot that nobody frees would keep back every later night.
        assert "concurrency_limit" not in deployment


def deployments():
    return yaml.safe_load((DEPLOY / "prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize(
    ("recipe", "flow"),
    [("nightly", "dume"), ("nightly-symphony", "symphony"), ("nightly-simoe", "simoe")],
)
def test_a_recipe_of_one_s_own_is_offered_with_the_flow_that_makes_its_model(recipe, flow):
    path = REPOSITORY / "recipes" / f"{recipe}.yaml"
    [made, *others] = offered(deployments(), path, ["folder=/texts"])
    read = load_as_it_is(path, ["folder=/texts"])
    assert made["entrypoint"] == f"flows/{flow}.py:{flow}"
    assert made["parameters"]["recipe"] == resolve(read)
    assert made["name"] == read.name
    assert not {"dume", "symphony", "simoe"} & {tag for each in others for tag in each["tags"]}


def test_a_method_without_a_section_is_offered_with_the_flow_that_makes_any(tmp_path):
    """As that of docs/adding-a-method.md; one with a deployment of its own has that."""
    path = tmp_path / "soup.yaml"
    nightly = (REPOSITORY / "recipes" / "nightly.yaml").read_text()
    path.write_text(f"{nightly}\nmethod: soup\n")
    [made, *others] = offered(deployments(), path, ["folder=/texts", "name=mine"])
    assert (made["entrypoint"], made["name"]) == ("flows/make.py:make", "mine")
    assert made["parameters"]["recipe"]["method"] == "soup"
    assert made["tags"] == ["soup", "recipe:mine"]
    assert made["description"] == "mine: a model made by soup."
    assert all("dume" not in each["tags"] for each in others)
    given = inspect.signature(make.fn).parameters.keys()
    assert made["parameters"].keys() <= given
    own = {**deployments()[0], "entrypoint": "flows/soup.py:soup"}
    own["parameters"] = {"recipe": "recipes/symphony.yaml"}
    found = list(offered([*deployments(), own], path, ["folder=/texts"]))
    assert [each["entrypoint"] for each in found].index("flows/soup.py:soup") == 0
    assert found[0]["parameters"]["recipe"]["method"] == "soup"
    assert len(found) == 1 + len(others)


def test_files_beside_the_recipe_come_along(tmp_path):
    """A model that is judged on tasks or compressed by hand is so at night too."""
    rows = tmp_path / "rows.yaml"
    rows.write_text("tasks:\n  words: {heldout: last_word, domain: python, items: 7}\n")
    path = REPOSITORY / "recipes" / "nightly.yaml"
    compression = REPOSITORY / "recipes" / "compression.yaml"
    found = list(offered(deployments(), path, ["folder=/texts"], [rows, compression]))
    recipes = [each["parameters"]["recipe"] for each in found if "recipe" in each["parameters"]]
    assert recipes
    assert all(recipe["tasks"]["words"]["items"] == 7 for recipe in recipes)
    assert all(recipe["compression"] for recipe in recipes)


@pytest.mark.parametrize(
    "words",
    [
        ["deploy", "a.yaml", "b.yaml", "c.yaml", "--notice", "mail/us"],
        ["deploy", "--notice", "mail/us", "a.yaml", "b.yaml", "c.yaml"],
    ],
)
def test_the_command_hands_on_the_files_beside_the_recipe(words, monkeypatch):
    asked = {}
    monkeypatch.setattr(commands, "deploy", lambda s, **given: asked.update(given) or ["dume/a"])
    commands.main(words)
    assert asked["recipe"] == Path("a.yaml")
    assert asked["added"] == [Path("b.yaml"), Path("c.yaml")]
    assert asked["notice"] == "mail/us"


@pytest.mark.parametrize("command", ["undeploy", "pool", "up", "status"])
def test_a_word_too_many_is_said(command, monkeypatch):
    for own in ("undeploy", "create_pool", "up", "status"):
        monkeypatch.setattr(commands, own, lambda *given, **named: pytest.fail("done"))
    with pytest.raises(SystemExit, match=f"'b.*{command} takes"):
        commands.main([command, "a", "b"])


def test_the_comparison_is_offered_with_its_rows_and_their_budget():
    [recipe] = [
        each["parameters"]["recipe"]
        for each in offered(deployments(), None, ())
        if each["entrypoint"] == "flows/compare.py:compare"
    ]
    assert recipe["baselines"]["btx"]["method"] == "btx"
    assert recipe["comparison"]["tokens"] == 2252800


@pytest.mark.parametrize("deployment", deployments(), ids=lambda each: each["entrypoint"])
def test_every_deployment_names_a_flow_and_what_it_takes(deployment):
    module, _, name = deployment["entrypoint"].removesuffix(".py").partition(".py:")
    flow = getattr(importlib.import_module(module.replace("/", ".")), name)
    given = dict(deployment.get("parameters", {}))
    changes = given.pop("set", [])
    if isinstance(given.get("recipe"), str):
        first, *others = [REPOSITORY / path for path in given["recipe"].split()]
        given["recipe"] = resolve(load_recipe(first, changes, added=others))
    asked = dict.fromkeys(set(flow.parameters.required or ()) - given.keys(), "law")
    assert asked.keys() <= {"domain", "run"}  # the form asks for it, the automation gives it
    assert given.keys() <= flow.parameters.properties.keys()
    flow.validate_parameters(given | asked)


def test_deployments_at_once_have_a_file_each_and_leave_none(tmp_path, monkeypatch):
    """Another recipe that is deployed meanwhile must not be deployed in this one's place."""
    seen = {}

    def run(command, **options):
        path = Path(command[-1])
        content = yaml.safe_load(path.read_text())
        seen[content["name"]] = path
        if content["name"] == "one":
            module.prefect_deploy({"name": "two"}, settings, {})
        assert yaml.safe_load(path.read_text()) == content
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(module.subprocess, "run", run)
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    settings.services.mkdir()
    module.prefect_deploy({"name": "one"}, settings, {})
    assert seen["one"] != seen["two"]
    assert not list(settings.services.iterdir())


class Server:
    """What a server keeps of deployments, and what Prefect's client says of them."""

    def __init__(self):
        self.kept = {}

    def read_deployments(self, limit, offset):
        return list(self.kept.values())[offset : offset + limit]

    def read_flow(self, flow):
        return SimpleNamespace(name=flow)

    def delete_resource_owned_automations(self, resource):
        pass

    def delete_deployment(self, name):
        del self.kept[name]

    def take(self, content, settings, environment):
        for given in content["deployments"]:
            flow = Path(given["entrypoint"].partition(":")[0]).stem
            name = f"{flow}/{given['name']}"
            kept = {key: given[key] for key in ("name", "tags", "parameters") if key in given}
            kept |= {"id": name, "flow_id": flow, "work_pool_name": given["work_pool"]["name"]}
            kept["schedules"] = [
                SimpleNamespace(schedule=CronSchedule(cron=own["cron"], timezone=own["timezone"]))
                for own in given.get("schedules", ())
            ]
            variables = dict(given["work_pool"].get("job_variables") or {})
            if "env" in variables:  # `prefect deploy` fills in what it finds in its environment
                variables["env"] = variables["env"] | {"UPCYCLE_HOME": str(settings.home)}
            self.kept[name] = SimpleNamespace(**kept, job_variables=variables)


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """A server, and ``deploy`` with all that it asks beside it."""
    server = Server()
    pools = {
        "cloud": Pool("cloud", tmp_path, {"image": "ours:2"}),
        "local": Pool("local", tmp_path),
    }
    for own in (module, standing):
        monkeypatch.setattr(own, "asked", lambda api: nullcontext(server))
    monkeypatch.setattr(module, "server_of", lambda settings: "http://server")
    monkeypatch.setattr(standing, "find_pool", lambda api, name, variables: pools[name])
    monkeypatch.setattr(module, "prefect_deploy", server.take)
    monkeypatch.setattr(module, "_complete", lambda client, deployment: None)
    monkeypatch.setattr(standing, "_check_block", lambda api, name: None)
    settings = read({"UPCYCLE_HOME": str(tmp_path)})
    for name in ("python", "heldout"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "one.txt").write_text(f"Text of {name}. " * 40)
    recipe = REPOSITORY / "recipes/nightly.yaml"

    def again(*changes, **told):
        return deploy(
            settings, recipe=recipe, changes=[f"folder={tmp_path / 'texts'}", *changes], **told
        )

    return server, again


NIGHT = "retrain/nightly-every-night"


def test_whoever_deploys_again_keeps_notice_and_pool(serving):
    """Growing a domain prints a command without them."""
    (server, again), image = serving, {"image": "ours:2"}
    told = "notice/nightly-failed-night"
    assert told not in again()
    assert told in again(notice="mail/us", pool="cloud", job_variables=image)
    assert told in again()
    assert server.kept[told].parameters == {"block": "mail/us"}
    assert (server.kept[NIGHT].work_pool_name, server.kept[NIGHT].job_variables) == ("cloud", image)
    assert told not in again(notice="none", pool="local")
    assert told not in server.kept
    assert server.kept[NIGHT].work_pool_name == "local"


def test_nights_without_an_end_are_said(serving, capsys):
    _, again = serving
    again("compute.limit_hours=null")
    assert "nightly has no compute.limit_hours" in capsys.readouterr().out
    again()
    assert "limit_hours" not in capsys.readouterr().out


def test_the_deployments_of_another_home_are_not_taken_over(serving, tmp_path):
    """Two teams may have a recipe of one name on one server: one's nights would end unsaid."""
    server, again = serving
    again()
    for place in (tmp_path, tmp_path / "somewhere" / ".."):
        server.kept[NIGHT].job_variables = {"env": {"UPCYCLE_HOME": str(place)}}
        again()
    server.kept[NIGHT].job_variables = {"env": {"UPCYCLE_HOME": "/srv/team"}}
    before = dict(server.kept)
    with pytest.raises(InputError, match=r"nightly is deployed for the home /srv/team") as error:
        again()
    assert "make undeploy NAME=nightly" in str(error.value)
    assert server.kept == before
    again("name=ours")
    assert server.kept[NIGHT].job_variables == {"env": {"UPCYCLE_HOME": "/srv/team"}}


def test_a_night_is_when_it_was_said_until_another_time_is(serving):
    server, again = serving

    def night():
        [own] = server.kept[NIGHT].schedules
        return own.schedule.cron, own.schedule.timezone

    again()
    assert night() == ("0 3 * * *", "UTC")
    again(schedule="30 1 * * 1-5", timezone="Europe/Berlin")
    again()
    assert night() == ("30 1 * * 1-5", "Europe/Berlin")
    again(timezone="Asia/Tokyo")
    assert night() == ("30 1 * * 1-5", "Asia/Tokyo")
    again(schedule="0 4 * * *")
    assert night() == ("0 4 * * *", "Asia/Tokyo")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"schedule": "99 3 * * *"}, r"^schedule = '99 3 \* \* \*': is no cron expression"),
        ({"timezone": "Europe/Atlantis"}, "^timezone = 'Europe/Atlantis': is no time zone"),
    ],
)
def test_a_time_that_cannot_be_is_refused_before_anything_is_deployed(serving, told, message):
    server, again = serving
    with pytest.raises(InputError, match=message):
        again(**told)
    assert not server.kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("method=soup", "method = 'soup': no method; use one of"),
        ("folder=/nowhere", r"domains\.python\.train\.files = '/nowhere/python/\*\.txt'"),
        ("domains.cpp={expert: /nowhere/model, train: {harvest: cpp}}", "/nowhere/model.*no such"),
    ],
)
def test_what_every_night_would_refuse_is_refused_before_anything_is_deployed(
    serving, change, message
):
    server, again = serving
    with pytest.raises(DeploymentError, match=f"Nothing was deployed:\n(.|\n)*{message}"):
        again(change)
    assert not server.kept


def test_texts_are_not_looked_for_where_the_flows_run_elsewhere(serving, capsys):
    _, again = serving
    assert again("folder=/nowhere", pool="cloud", job_variables={"image": "ours:2"})
    assert "are not looked at: the pool cloud has its own" in capsys.readouterr().out
    with pytest.raises(DeploymentError, match="no method"):
        again("folder=/nowhere", "method=soup")


def test_a_model_that_cannot_learn_has_no_nights(serving, monkeypatch):
    _, again = serving
    monkeypatch.setattr(module, "check_recipe", lambda *given, **named: False)
    names = again(notice="mail/us")
    assert "dume/nightly" in names
    assert not {name.partition("/")[0] for name in names} & {"retrain", "notice", "grow", "shrink"}


def test_instructions_and_tasks_that_are_not_there_are_not_deployed(tmp_path, capsys):
    """Each night would fail at them."""
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text("tasks: {sums: {definition: recipes/tasks/none.yaml}}\n")
    where = f"instructions.sources.answers.files=['{tmp_path}/none.jsonl']"
    recipes = REPOSITORY / "recipes"
    for words, field in [
        (["nightly-simoe.yaml", "--set", "folder=/texts", "--set", where], "answers.files"),
        (["demo.yaml", str(tasks)], "tasks.sums.definition"),
    ]:
        assert tasks_offered.main([str(recipes / words[0]), *words[1:]]) == 2
        assert f"{field} = " in capsys.readouterr().err
        assert tasks_offered.main([str(recipes / words[0]), *words[1:], "--elsewhere"]) == 0


@pytest.mark.parametrize("lives", [True, False])
def test_the_check_says_whether_a_method_s_models_live_on(lives, monkeypatch, capsys):
    if not lives:
        dume = replace(METHODS["dume"], life=None)
        monkeypatch.setattr(tasks_offered, "METHODS", {**METHODS, "dume": dume})
    path = REPOSITORY / "recipes" / "nightly.yaml"
    assert tasks_offered.main([str(path), "--set", "folder=/texts", "--elsewhere"]) == 0
    assert json.loads(capsys.readouterr().out) == {"lives": lives}
