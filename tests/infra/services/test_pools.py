"""Work pools of containers on a real server; what workers would start, by Prefect's own classes.

Nothing here runs a container: there is neither Docker nor a Kubernetes cluster in the tests.
"""

import asyncio
import dataclasses
import os
import uuid
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from docker.models.containers import _create_container_args
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    temporary_settings,
)
from prefect_server import prefect_server
from texts import pico_recipe, save_recipe

from infra import settings
from infra.recipe.reading import load_recipe
from infra.recipe.schema import resolve
from infra.services import commands, deployments, pools
from infra.services.deployments import PREFECT_FILE, deploy
from infra.services.pools import create_pool, template_of
from upcycle_core.errors import InputError

# To deploy takes half a minute.
KINDS = (pytest.param("docker", marks=pytest.mark.faults), "kubernetes")
ADDRESSES = {
    "PREFECT_API_URL": "http://prefect.ml:4200/api",
    "MLFLOW_TRACKING_URI": "http://mlflow.ml:5000",
    "RAY_ADDRESS": "ray://ray-head.ml:10001",
}
CHANGES = {
    "docker": ["image=upcycle", "memory_limit=16g", "nano_cpus=2000000000"],
    "kubernetes": [
        "image=registry.example/upcycle:1",
        "namespace=ml",
        "service_account_name=flows",
        "claim=shared-home",
        "secret=tokens",
        "cpu_request=2",
        "memory_limit=16Gi",
        "finished_job_ttl=600",
        *(f"env.{name}={value}" for name, value in ADDRESSES.items()),
    ],
}
JOB_VARIABLES = {"image": "mirror.example/upcycle:2", "image_pull_policy": "Always"}
KUBERNETES = "1.33"
"""The version by whose schema a Job is checked."""
WORD = "opensesame"
DOCKER = {
    # `docker login` on the worker's machine serves.
    "job_configuration": {"registry_credentials", "memswap_limit"},
    # The volume is one, at the home; a container has no privileges; the rest has names of its own.
    "variables": {
        "registry_credentials",
        "memswap_limit",
        "mem_limit",
        "volumes",
        "privileged",
        "container_create_kwargs",
    },
}
KUBERNETES_OWN = {
    # The worker's own cluster is the one.
    "job_configuration": {"cluster_config"},
    "variables": {"cluster_config", "backoff_limit"},
}


def worker_of(kind):
    """The class of Prefect's worker; its package takes a second to import."""
    if kind == "docker":
        from prefect_docker.worker import DockerWorker

        return DockerWorker
    from prefect_kubernetes.worker import KubernetesWorker

    return KubernetesWorker


@pytest.fixture(scope="module")
def place():
    return dataclasses.replace(settings.read(os.environ), prefect_api_url=prefect_server())


@pytest.fixture(scope="module")
def client(place):
    with (
        temporary_settings({PREFECT_API_URL: place.prefect_api_url}),
        get_client(sync_client=True) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """One of the deployments: each takes seconds."""
    content = yaml.safe_load(PREFECT_FILE.read_text())
    file = tmp_path_factory.mktemp("pools") / "prefect.yaml"
    offered = [d for d in content["deployments"] if d["tags"] == ["dume"]]
    file.write_text(yaml.safe_dump({**content, "deployments": offered}))
    return file


@pytest.fixture(scope="module")
def compose():
    file = settings.REPOSITORY / "infra" / "services" / "deploy" / "compose.yaml"
    return yaml.safe_load(file.read_text())


def started(client, kind, deployment):
    """What the pool's worker would start for a run of a deployment."""
    pool = client.read_work_pool(f"our-{kind}")
    flow = client.read_flow(deployment.flow_id)
    run = FlowRun(id=uuid.uuid4(), name="a-run", flow_id=flow.id, deployment_id=deployment.id)
    configuration = asyncio.run(
        worker_of(kind).job_configuration.from_template_and_values(
            pool.base_job_template, deployment.job_variables
        )
    )
    configuration.prepare_for_flow_run(run, deployment, flow, pool, "a-worker")
    return configuration


@pytest.fixture(scope="module")
def deployed(place, client, file):
    """Of a type of pool (a deployment of a recipe to it, what the pool's worker would start)."""

    @cache
    def of(kind):
        name = f"our-{kind}"
        assert create_pool(place, kind, name=name, changes=CHANGES[kind]) == name
        names = deploy(place, prefect_file=file, pool=name, job_variables=JOB_VARIABLES)
        assert names == ["dume/demo"]
        deployment = client.read_deployment_by_name("dume/demo")
        return deployment, started(client, kind, deployment)

    return of


@pytest.fixture
def manifest(deployed):
    return deployed("kubernetes")[1].job_manifest


def container_of(manifest):
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("kind", KINDS)
def test_a_deployment_names_the_pool_and_the_checkout_of_its_image(deployed, kind):
    deployment, _ = deployed(kind)
    assert deployment.work_pool_name == f"our-{kind}"
    assert deployment.pull_steps == [
        {"prefect.deployments.steps.set_working_directory": {"directory": "/upcycle"}}
    ]
    assert deployment.job_variables == JOB_VARIABLES
    assert deployment.entrypoint == "flows/dume.py:dume"


@pytest.mark.parametrize("kind", KINDS)
def test_flows_in_containers_find_the_servers_ray_and_the_workspaces(deployed, compose, kind):
    environment = deployed(kind)[1].env
    addresses = ADDRESSES
    if kind == "docker":
        worker = compose["services"]["worker"]["environment"]
        addresses = {name: worker[name] for name in ADDRESSES}
    expected = {
        **addresses,
        "RAY_AUTH_MODE": "token",
        "UPCYCLE_HOME": "/home/upcycle",
        "PREFECT_HOME": "/home/upcycle/prefect",
        "PYTHONPATH": "/upcycle",
    }
    assert {name: environment.get(name) for name in expected} == expected
    found = settings.read(environment)
    assert found.home == Path("/home/upcycle")
    assert (found.prefect_api_url, found.mlflow_tracking_uri, found.ray_address) == (
        *addresses.values(),
    )


def test_the_templates_fit_the_image_the_network_and_the_volume_of_compose(compose):
    image = compose["services"]["prefect"]["build"]["dockerfile_inline"]
    assert f"WORKDIR {pools.CHECKOUT}\n" in image
    assert f"UPCYCLE_HOME={pools.HOME} " in image
    assert "ENTRYPOINT" not in image  # or a Job's `args` would be its arguments
    properties = template_of("docker", changes=["image=upcycle"])["variables"]["properties"]
    assert "home" in compose["volumes"]
    assert properties["volume"]["default"] == f"{compose['name']}_home"
    assert properties["networks"]["default"] == [f"{compose['name']}_default"]


@pytest.mark.faults
def test_docker_gets_a_container_that_mounts_the_home_and_ends_for_good(deployed):
    configuration = deployed("docker")[1]
    worker = worker_of("docker")(work_pool_name="our-docker")
    asked = worker._build_container_settings(None, configuration)  # a client, for servers here
    assert configuration.image_pull_policy == "Always"
    networks = [asked.pop("network")]
    container = _create_container_args({"version": "1.43", **asked})
    host = container["host_config"]
    assert container["image"] == "mirror.example/upcycle:2"
    assert container["command"] == "prefect flow-run execute"
    assert networks == ["upcycle_default"]
    assert host["Binds"] == ["upcycle_home:/home/upcycle"]
    assert container["volumes"] == [container["environment"]["UPCYCLE_HOME"]]
    assert host["RestartPolicy"] == {"Name": "no"}
    assert (host["Init"], host["ShmSize"]) == (True, 2 * 1024**3)
    assert (host["Memory"], host["NanoCpus"]) == (16 * 1024**3, 2_000_000_000)
    assert not host.get("Privileged")
    assert container["environment"]["RAY_AUTH_TOKEN_PATH"] == "/home/upcycle/ray-token"


def test_kubernetes_accepts_the_job(manifest):
    pod = manifest["spec"]["template"]["spec"]
    # Prefect insists on two fields of a Job in the pod, where Kubernetes ignores them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    try:
        assert kubernetes_validate.validate(manifest, KUBERNETES, strict=True) == KUBERNETES
        pod["restart"] = "Never"
        with pytest.raises(kubernetes_validate.ValidationError, match="'restart' was unexpected"):
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    finally:
        pod.pop("restart", None)
        pod |= {"parallelism": 1, "completions": 1}


def test_a_job_is_what_the_pool_was_told(manifest):
    assert manifest["metadata"]["namespace"] == "ml"
    assert manifest["metadata"]["generateName"] == "a-run-"
    pod, container = manifest["spec"]["template"]["spec"], container_of(manifest)
    assert pod["serviceAccountName"] == "flows"
    assert pod["automountServiceAccountToken"] is False
    assert container["image"] == "mirror.example/upcycle:2"
    assert container["imagePullPolicy"] == "Always"
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "16Gi"},
    }


def test_kubernetes_starts_nothing_again_and_prefect_what_was_evicted(manifest, deployed):
    assert manifest["spec"]["backoffLimit"] == 0
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 600
    assert manifest["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    behaviour = "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"
    assert deployed("kubernetes")[1].env[behaviour] == "reschedule"


def test_a_job_mounts_the_claim_where_its_flow_has_its_home(manifest):
    pod, container = manifest["spec"]["template"]["spec"], container_of(manifest)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["home"]["persistentVolumeClaim"] == {"claimName": "shared-home"}
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert mounts["home"] == environment["UPCYCLE_HOME"]
    assert len(environment) == len(container["env"])
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
    assert mounts["shared-memory"] == "/dev/shm"


def test_another_home_moves_the_mount_with_it():
    changes = CHANGES["kubernetes"]
    template = template_of("kubernetes", home="/shared/upcycle", changes=changes)
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    environment = template["variables"]["properties"]["env"]["default"]
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/shared/upcycle"
    assert environment["UPCYCLE_HOME"] == "/shared/upcycle"
    template = template_of("docker", home="/shared/upcycle/", changes=CHANGES["docker"])
    assert template["job_configuration"]["volumes"] == ["{{ volume }}:/shared/upcycle"]
    environment = template["variables"]["properties"]["env"]["default"]
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/shared/upcycle/ray-token"


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_come_from_kubernetes_or_a_file_and_stand_nowhere(client, deployed, kind):
    deployment, _ = deployed(kind)
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: f"postgresql://u:{WORD}@h"}):
        configuration = started(client, kind, deployment)
    assert WORD not in configuration.model_dump_json()
    environment = configuration.env
    assert not [name for name in environment if name.endswith(("TOKEN", "PASSWORD", "KEY"))]
    if kind == "kubernetes":
        secrets = container_of(configuration.job_manifest)["envFrom"]
        assert secrets == [{"secretRef": {"name": "tokens"}}]


@pytest.mark.parametrize(("kind", "left_out"), [("docker", DOCKER), ("kubernetes", KUBERNETES_OWN)])
def test_a_template_leaves_out_of_the_worker_s_own_what_is_said_here_alone(kind, left_out):
    """What a new version of a worker offers is found here, and decided on."""
    theirs = worker_of(kind).get_default_base_job_template()
    ours = template_of(kind, changes=CHANGES[kind])
    for part, own in (("job_configuration", theirs["job_configuration"]), ("variables", None)):
        have = ours[part] if own else ours[part]["properties"]
        offered = own or theirs[part]["properties"]
        assert offered.keys() - have.keys() == left_out[part]
    if kind == "kubernetes":
        theirs, ours = (
            each["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
            for each in (theirs, ours)
        )
        assert theirs.keys() <= ours.keys()
        assert theirs["containers"][0].keys() <= ours["containers"][0].keys()


def test_a_pool_that_is_there_gets_the_new_template_and_keeps_its_type(place, client):
    create_pool(place, "docker", name="again", changes=["image=upcycle:1"])
    create_pool(place, "docker", name="again", changes=["image=upcycle:2"])
    template = client.read_work_pool("again").base_job_template
    assert template["variables"]["properties"]["image"]["default"] == "upcycle:2"
    with pytest.raises(InputError, match="is a pool of the type docker, which stays what it is"):
        create_pool(place, "kubernetes", name="again", changes=CHANGES["kubernetes"])
    assert client.read_work_pool("again").base_job_template == template


REFUSED = {
    "no type": ("", [], "type = '': has no template; choose docker or kubernetes"),
    "no image": ("docker", [], "image = None: flows run in an image"),
    "no change": ("docker", ["image"], "set = 'image': is no change"),
    "unknown": ("docker", ["image=a", "claim=b"], "claim = 'b': is no variable here"),
    "addresses": ("kubernetes", ["image=a"], "env.RAY_ADDRESS = None: say what containers call it"),
    "loopback": (
        "docker",
        ["image=a", "env.PREFECT_API_URL=http://127.0.0.1:4200/api"],
        "env.PREFECT_API_URL = 'http://127.0.0.1:4200/api': is the container itself there",
    ),
    "loopback of Ray": (
        "docker",
        ["image=a", "env.RAY_ADDRESS=localhost:6379"],
        "env.RAY_ADDRESS = 'localhost:6379': is the container itself there",
    ),
    "two networks": (
        "docker",
        ["image=a", "network_mode=host"],
        "networks = ['upcycle_default']: cannot be beside network_mode",
    ),
    "secret": (
        "docker",
        ["image=a", "env.RAY_AUTH_TOKEN=abc"],
        "env.RAY_AUTH_TOKEN = '(hidden)': everybody who sees the pool can read it",
    ),
    "password": (
        "docker",
        ["image=a", "env.MLFLOW_TRACKING_URI=http://me:abc@mlflow:5000"],
        "env.MLFLOW_TRACKING_URI = '(hidden)': everybody",
    ),
    "home": (
        "docker",
        ["image=a", "env.UPCYCLE_HOME=/there"],
        "env.UPCYCLE_HOME = '/there': comes from --home PATH",
    ),
    "choice": (
        "docker",
        ["image=a", "image_pull_policy=Sometimes"],
        "image_pull_policy = 'Sometimes': choose IfNotPresent, Always, IfPossible or Never",
    ),
    "quantity": (
        "kubernetes",
        [*CHANGES["kubernetes"], "memory_request=4 GB"],
        "memory_request = '4 GB': is not what is taken here: What a flow's pod is promised",
    ),
    "number": (
        "kubernetes",
        [*CHANGES["kubernetes"], "finished_job_ttl=soon"],
        "finished_job_ttl = 'soon': is not what is taken here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_with_a_pool_is_said_before_it_is_made(place, client, case):
    kind, changes, message = REFUSED[case]
    with pytest.raises(InputError) as refused:
        create_pool(place, kind, name="refused", changes=changes)
    assert message in str(refused.value)
    assert "abc" not in str(refused.value)
    assert "refused" not in {pool.name for pool in client.read_work_pools()}


@pytest.mark.parametrize("home", ["home", "/a/../b", "/a:ro", "/a b"])
def test_a_home_is_an_absolute_path(home):
    with pytest.raises(InputError, match=r"home = .*: is no absolute path"):
        template_of("docker", home=home, changes=CHANGES["docker"])


def test_servers_of_this_machine_are_reached_through_its_network():
    changes = ["image=a", "network_mode=host", "networks=[]", "nano_cpus=2000000000"]
    changes += ["env.PREFECT_API_URL=http://127.0.0.1:4200/api"]
    template = template_of("docker", changes=changes)
    configuration = asyncio.run(
        worker_of("docker").job_configuration.from_template_and_values(template, {})
    )
    assert configuration.get_network_mode() == "host"
    assert configuration.networks == []
    assert configuration.container_create_kwargs["nano_cpus"] == 2_000_000_000


UNUSABLE = {
    "nobody": ({}, "pool = 'nobody': is no work pool of the server, which has: "),
    "ecs": ({}, "pool = 'ecs': is a pool of the type ecs, for which there is no template"),
    "theirs": ({}, "pool = 'theirs': its template says nothing of UPCYCLE_HOME and the checkout"),
    "processes": ({"image": "a"}, "image = 'a': the pool processes runs processes"),
    "ready": (
        {"image_pull_policy": "Sometimes"},
        "image_pull_policy = 'Sometimes': choose IfNotPresent, Always, IfPossible or Never",
    ),
    "imageless": ({}, "image = None: flows run in an image"),
}


@pytest.fixture(scope="module")
def unusable(place, client):
    default = worker_of("docker").get_default_base_job_template()
    for name, kind in {"ecs": "ecs", "theirs": "docker", "processes": "process"}.items():
        template = {} if kind == "process" else default
        client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template))
    create_pool(place, "docker", name="ready", changes=["image=upcycle"])
    imageless = template_of("docker", changes=["image=upcycle"])
    del imageless["variables"]["properties"]["image"]["default"]
    pool = WorkPoolCreate(name="imageless", type="docker", base_job_template=imageless)
    client.create_work_pool(pool)


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_pool_that_cannot_be_deployed_to_is_said_before_anything_is_written(
    place, client, unusable, tmp_path, name
):
    variables, message = UNUSABLE[name]
    before = {each.id: each.updated for each in client.read_deployments()}
    elsewhere = dataclasses.replace(place, home=tmp_path)
    with pytest.raises(InputError) as refused:
        deploy(elsewhere, pool=name, job_variables=variables)
    assert message in str(refused.value)
    assert {each.id: each.updated for each in client.read_deployments()} == before
    assert not list(tmp_path.iterdir())


@pytest.mark.faults
def test_a_recipe_whose_pool_was_deleted_does_not_move_to_this_machine(
    place, client, file, tmp_path
):
    values = pico_recipe(tmp_path, name="orphan")
    for domain in values["domains"].values():
        domain["train"]["files"] = ["/texts/of.jsonl"]
    recipe = save_recipe(tmp_path / "orphan.yaml", values)
    create_pool(place, "docker", name="passing", changes=["image=upcycle"])
    deploy(place, recipe=recipe, prefect_file=file, pool="passing")
    client.delete_work_pool("passing")
    with pytest.raises(InputError, match="has been deleted; name another: --pool NAME, or --pool"):
        deploy(place, recipe=recipe, prefect_file=file)


@pytest.mark.faults
def test_a_deployment_holds_its_recipe_s_templates_to_the_letter(
    place, client, unusable, file, tmp_path, monkeypatch
):
    """What stands in two braces there is no place that Prefect fills, nor `{notice}` ours."""
    monkeypatch.setattr(deployments, "check_recipe", lambda *given, **named: True)  # no such text
    values = pico_recipe(tmp_path, name="templates")
    template = "{question}\n\\boxed{{{answer}}}, {{HOME}}, {{ prefect.variables.x }}, {notice}"
    for domain in values["domains"].values():
        source = domain["train"]
        source["files"], source["template"] = ["/texts/of.jsonl"], template
    recipe = save_recipe(tmp_path / "templates.yaml", values)
    complete, at_first = deployments._complete, []

    def completed(client, given):
        at_first.append(client.read_deployment_by_name("dume/templates").parameters)
        complete(client, given)

    monkeypatch.setattr(deployments, "_complete", completed)
    own = {"prefect_file": file, "pool": "processes"}
    assert deploy(place, recipe=recipe, **own) == ["dume/templates"]
    assert at_first == [{"recipe": resolve(load_recipe(recipe))}]  # what a kill leaves behind it
    deployment = client.read_deployment_by_name("dume/templates")
    assert deployment.parameters == {"recipe": resolve(load_recipe(recipe))}
    assert deployment.parameters["recipe"]["domains"]["letters"]["train"]["template"] == template


@pytest.mark.faults
def test_another_pool_of_processes_runs_flows_as_the_local_one_does(place, client, unusable, file):
    deploy(place, prefect_file=file, pool="processes")
    deployment = client.read_deployment_by_name("dume/demo")
    assert deployment.work_pool_name == "processes"
    checkout = str(settings.REPOSITORY)
    assert deployment.job_variables == {
        "env": {"UPCYCLE_HOME": str(place.home), "PYTHONPATH": checkout}
    }
    assert deployment.pull_steps == [
        {"prefect.deployments.steps.set_working_directory": {"directory": checkout}}
    ]


def test_the_command_makes_a_pool_and_says_how_its_worker_is_started(
    place, client, monkeypatch, capsys
):
    monkeypatch.setenv("PREFECT_API_URL", place.prefect_api_url)
    commands.main(["pool", "docker", "--name", "mine", "--image", "a:1", "--set", "volume=/mnt"])
    assert "prefect worker start --pool mine --type docker\n" in capsys.readouterr().out
    properties = client.read_work_pool("mine").base_job_template["variables"]["properties"]
    assert (properties["image"]["default"], properties["volume"]["default"]) == ("a:1", "/mnt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pool", "nobody"], UNUSABLE["nobody"][1]),
        (["--pool", "processes", "--image", "a"], UNUSABLE["processes"][1]),
        (["--pool", "ready", "--pull-policy", "Sometimes"], UNUSABLE["ready"][1]),
        (["--image", "a", "--pool", ""], "image = 'a': name the pool that runs it: --pool NAME"),
    ],
)
def test_the_command_hands_on_pool_image_and_policy(place, unusable, monkeypatch, options, message):
    monkeypatch.setenv("PREFECT_API_URL", place.prefect_api_url)
    with pytest.raises(SystemExit) as refused:
        commands.main(["deploy", *options])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pool", "docker", "--pool", "x"], "--pool = 'x': pool takes no such option; deploy does"),
        (["deploy", "--home", "/x"], "--home = '/x': deploy takes no such option; pool does"),
        (["status", "--image", "x"], "--image = 'x': status takes no such option; deploy and pool"),
    ],
)
def test_an_option_of_another_command_is_said(arguments, message):
    with pytest.raises(SystemExit) as refused:
        commands.main(arguments)
    assert message in str(refused.value)
