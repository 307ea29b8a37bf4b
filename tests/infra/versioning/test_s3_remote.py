"""A DVC remote on S3: DVC and its package as they are, with a server on loopback."""

import hashlib
import importlib.util
import shutil

import pytest
from s3_server import client, s3_server
from test_versions import pushed

from infra.versioning import versions as module
from upcycle_core.errors import InputError

REMOTE = "s3://models/upcycle/pico"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3") / "server.log") as environment:
        client(environment).create_bucket(Bucket="models")
        yield environment


@pytest.fixture
def bucket(server, monkeypatch):
    """What lies in it, of a user who has named the server in the environment."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return client(server)


def objects(bucket):
    """{key: content} of the whole bucket."""
    listed = bucket.list_objects_v2(Bucket="models").get("Contents", [])
    return {
        entry["Key"]: bucket.get_object(Bucket="models", Key=entry["Key"])["Body"].read()
        for entry in listed
    }


def test_what_was_pushed_comes_back_elsewhere_and_what_was_changed_there_does_not(bucket, tmp_path):
    here, there = pushed(tmp_path, REMOTE)
    md5 = hashlib.md5(b"weights").hexdigest()
    key = f"upcycle/pico/files/md5/{md5[:2]}/{md5[2:]}"
    assert objects(bucket)[key] == b"weights"
    shutil.rmtree(here.root / ".dvc" / "cache")

    there.pull(here.lock_text(), REMOTE, {"model": "model"})
    assert (there.root / "model" / "weights").read_text() == "weights"

    shutil.rmtree(there.root / "model")
    shutil.rmtree(there.root / ".dvc" / "cache")
    bucket.put_object(Bucket="models", Key=key, Body=b"Weights")
    with pytest.raises(InputError, match=r"dvc pull.*model"):
        there.pull(here.lock_text(), REMOTE, {"model": "model"})
    assert not (there.root / "model").exists()


def test_a_bucket_that_is_not_there_is_named_and_not_waited_for(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WAITS", (600.0,))
    with pytest.raises(InputError, match=r"dvc push.*bucket"):
        pushed(tmp_path, "s3://nowhere/upcycle")


def test_a_remote_whose_package_is_missing_is_refused_beforehand(tmp_path, monkeypatch):
    everything = importlib.util.find_spec
    assert not list(module.remote_faults("remote", REMOTE, tmp_path))
    without = lambda name: None if name == "dvc_s3" else everything(name)  # noqa: E731  (a stand-in)
    monkeypatch.setattr(importlib.util, "find_spec", without)
    [fault] = module.remote_faults("remote", REMOTE, tmp_path)
    assert fault.field == "remote"
    assert "'.[s3]'" in fault.remedy
    for other in (None, "remote", "/s3", "https://host/a", "remote://mine/a"):
        assert not list(module.remote_faults("remote", other, tmp_path))
