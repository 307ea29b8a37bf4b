import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from infra.settings import REPOSITORY

DEPLOY = REPOSITORY / "infra" / "deploy"


def test_containers_are_published_on_loopback_only_and_wait_for_what_they_need():
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = content["services"]
    assert set(services) == {"prefect", "mlflow", "worker"}
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000"]
    for service in services.values():
        for needed in service.get("depends_on", {}):
            assert "healthcheck" in services[needed]
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in content["volumes"]


def test_ray_accepts_the_cluster_file():
    content = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    validate_config(prepare_config(content))
    assert content["max_workers"] == len(content["provider"]["worker_ips"])


def test_every_deployment_names_a_recipe_and_the_pool_that_up_starts():
    content = yaml.safe_load((DEPLOY / "prefect.yaml").read_text())
    for deployment in content["deployments"]:
        for path in deployment["parameters"]["recipe"].split():
            assert (REPOSITORY / path).is_file()
        assert deployment["work_pool"]["name"] == "local"
        assert deployment["concurrency_limit"]["limit"] == 1
