"""moto's S3 in a process of its own. It is fast, and accepts any credentials and checksums."""

import secrets
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test:tester",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Credentials that Swift requires. moto accepts any."""

_SERVE = """
import io, sys, threading, warnings
warnings.simplefilter("ignore")
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
backend = DomainDispatcherApplication(create_backend_app)
writing = threading.Lock()
def application(environ, start_response):
    # It answers 500 now and then when one object is written twice at the same time.
    if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
        return backend(environ, start_response)
    size = int(environ.get("CONTENT_LENGTH") or 0)
    environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(size))
    with writing:
        return backend(environ, start_response)
server = make_server("127.0.0.1", 0, application, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""


def s3_client(
    url: str, *, access_key: str = "test:tester", secret_key: str = "testing"
) -> "S3Client":
    return boto3.session.Session().client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def s3_settings(url: str, bucket: str, **more: object) -> dict[str, Any]:
    """Return a server's settings for a bucket. Default: without a tier."""
    return {
        "blob_store": "s3",
        "s3_bucket": bucket,
        "s3_endpoint_url": url,
        "s3_addressing": "path",
        "tier_limit_bytes": 0,
    } | more


class AnyS3:
    """The address of an S3 and its credentials."""

    url: str
    access_key: str
    secret_key: str
    client: "S3Client"

    def new_bucket(self) -> str:
        name = f"bucket-{secrets.token_hex(8)}"
        self.client.create_bucket(Bucket=name)
        return name


class Moto(AnyS3):
    """moto's server; a context manager. The server ends with this process, even if it is killed."""

    access_key = CREDENTIALS["AWS_ACCESS_KEY_ID"]
    secret_key = CREDENTIALS["AWS_SECRET_ACCESS_KEY"]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = s3_client(self.url)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.kill()
        self._process.communicate()
