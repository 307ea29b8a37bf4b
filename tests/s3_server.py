"""A server that speaks S3, of moto, on loopback: buckets in the memory of a process of its own."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from prefect_server import free_port

START_SECONDS = 120


@contextmanager
def s3_server(log: Path) -> Iterator[dict[str, str]]:
    """Run one; the environment in which programs find it.

    Args:
        log: The file that it writes to.
    """
    address = f"http://127.0.0.1:{free_port()}"
    command = "import sys; from moto.server import main; main(sys.argv[1:])"
    port = address.rpartition(":")[2]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", command, "-H", "127.0.0.1", "-p", port],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.wait()


def client(environment: dict[str, str]):
    """A client of Amazon's own library, to look into buckets with."""
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
    )


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/moto-api/", timeout=5):
            return True
    except OSError:
        return False
