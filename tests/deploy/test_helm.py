"""The chart of docker/helm, rendered by Helm, checked against Kubernetes' schemas, and run.

Commands, environments and probes of the rendered pods run as processes here.
"""

import contextlib
import copy
import json
import os
import re
import subprocess
import sysconfig

import httpx
import pytest
import yaml

from graphstash_schema import TOKEN_FORM, ArtifactKey, Digest
from graphstash_schema.version import __version__
from graphstash_server.settings import Settings
from support.compose import DOCKER, Image
from support.helm import CHART, render, render_all, validate
from support.issuer import Cluster
from support.moto import CREDENTIALS, Moto
from support.nginx import Nginx
from support.ports import reserved_port
from support.postgres import EMPTY
from support.processes import captured
from support.tokens import Guarded
from support.waiting import PATIENT_VARIABLES, until

pytestmark = pytest.mark.extended

SMALLEST = {"database": {"secret": "database"}, "blobs": {"bucket": "graphs"}}
EVERYTHING = {
    **SMALLEST,
    "nginx": {"enabled": True},
    "ingress": {"enabled": True, "host": "cache.internal"},
    "autoscaling": {"enabled": True, "minReplicas": 4},
    "networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]},
    "serviceMonitor": {"enabled": True, "tokenSecret": "metrics"},
}
PAGE = (DOCKER.parent / "docs" / "kubernetes.md").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def merged(base, more):
    """Merge values like Helm."""
    if not (isinstance(base, dict) and isinstance(more, dict)):
        return copy.deepcopy(more)
    return {
        name: merged(base[name], more[name]) if name in base and name in more else each
        for name, each in {**base, **more}.items()
    }


def leaves(schema, *path):
    for name, each in schema["properties"].items():
        if "properties" in each:
            yield from leaves(each, *path, name)
        elif name != "global":
            yield (*path, name), each


def nested(path, value):
    return {path[0]: nested(path[1:], value)} if path else value


def only(objects, kind, name="graphstash"):
    (found,) = (
        each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def blocks():
    """Return the page's files by title."""
    pattern = r'^```yaml title="([\w.-]+)"\n(.*?)^```$'
    return dict(re.findall(pattern, PAGE, re.MULTILINE | re.DOTALL))


def test_chart_has_the_versions_of_the_distribution():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def test_schema_describes_exactly_the_values_of_the_chart():
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def named(values, schema, *path):
        for name, each in values.items():
            below = schema["properties"].get(name, {})
            if "properties" in below:
                yield from named(each, below, *path, name)
            else:
                yield (*path, name)

    assert set(named(defaults, SCHEMA)) == {path for path, _ in leaves(SCHEMA)}


# Other values without which EVERYTHING would hide the effect of a value.
BESIDE = {
    ("blobs", "store"): {"blobs": {"claim": "blobs"}},
    ("blobs", "claim"): {"blobs": {"store": "disk", "claim": "another"}},
    ("replicas",): {"autoscaling": {"enabled": False}},
}


def test_every_value_changes_the_rendered_chart():
    """Each value is set to the example in its schema."""
    cases = []
    for path, schema in leaves(SCHEMA):
        base = merged(EVERYTHING, BESIDE.get(path, {}))
        examples = [False, True] if schema.get("type") == "boolean" else schema["examples"]
        before = merged(base, nested(path, examples[0])) if len(examples) > 1 else base
        cases += [(path, before), (path, merged(base, nested(path, examples[-1])))]
    rendered = render_all([values for _, values in cases])

    assert [one for one in rendered if isinstance(one, str)] == []
    pairs = zip(rendered[::2], rendered[1::2], cases[::2], strict=True)
    assert [case[0] for before, after, case in pairs if before == after] == []


def test_rendered_objects_follow_the_schemas_of_kubernetes():
    examples = EVERYTHING
    for path, schema in leaves(SCHEMA):
        if path not in BESIDE and "examples" in schema:
            examples = merged(examples, nested(path, schema["examples"][0]))
    on_disk = {**EVERYTHING, "blobs": {"store": "disk", "claim": "blobs"}}
    for values in (SMALLEST, examples, on_disk):
        validate(render(values)["objects"])


def test_every_setting_is_set_by_the_chart_or_can_be_set():
    env = container_of(render(SMALLEST))["env"]
    taken = {each["name"] for each in env}
    assert "GRAPHSTASH_DATABASE_URL" in taken
    names = [f"GRAPHSTASH_{name.upper()}" for name in Settings.model_fields]
    tls = {name for name in names if name.startswith("GRAPHSTASH_TLS_")}
    free = [name for name in names if name not in taken | tls]
    given = render({**SMALLEST, "settings": dict.fromkeys(free, "x")})
    assert {each["name"] for each in container_of(given)["env"]} == {*names} - tls


def test_refusal_of_a_wrong_value_names_it():
    incomplete = [{}, {"database": {"secret": "a"}}]
    wrong = [
        ({}, "set database.secret to the name of a Secret"),
        ({"database": {"secret": "a"}}, "set blobs.bucket to the bucket"),
        ({"blobs": {"store": "disk"}}, "set blobs.claim to a PersistentVolumeClaim"),
        ({"blobs": {"store": "tape"}}, "'/blobs/store'"),
        ({"blobs": {"store": "azure"}}, "set settings.AZURE_STORAGE_ACCOUNT_NAME"),
        ({"blobs": {"tier": {"size": "16 gigabytes"}}}, "'/blobs/tier/size'"),
        ({"replica": 3}, "'replica' not allowed"),
        ({"replicas": 0}, "'/replicas': minimum"),
        ({"settings": {"GRAPHSTASH_PORT": 80}}, "the chart sets this variable itself"),
        ({"settings": {"GRAPHSTASH_RETAIN_DAYS": None}}, "GRAPHSTASH_RETAIN_DAYS has no value"),
        ({"settings": {"PATH": "/"}}, "invalid propertyName 'PATH'"),
        ({"settings": {"GRAPHSTASH_NAMESPACE_LIMITS": {"*": "1GiB"}}}, "as JSON in a string"),
        ({"settings": {"GRAPHSTASH_TLS_CERT_FILE": "/tls"}}, "end TLS at the ingress"),
        ({"ingress": {"enabled": True}}, "set ingress.host"),
        ({"networkPolicy": {"enabled": True}}, "set networkPolicy.clients"),
        (
            {"serviceMonitor": {"enabled": True}, "settings": {"GRAPHSTASH_METRICS": False}},
            "set serviceMonitor.tokenSecret",
        ),
        ({"podDisruptionBudget": {"minAvailable": 2}}, "leaves no server to drain of 2"),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "is above autoscaling.maxReplicas"),
    ]
    complete = [values if values in incomplete else merged(SMALLEST, values) for values, _ in wrong]
    refusals = zip(wrong, render_all(complete), strict=True)
    assert [text for (_, text), refusal in refusals if text not in refusal] == []


def test_settings_keep_their_values():
    values = {"A": 500_000_000_000, "B": 0.5, "C": True, "D": [{"a": 1}]}
    settings = {f"GRAPHSTASH_{name}": value for name, value in values.items()}
    env = container_of(render({**SMALLEST, "settings": settings}))["env"]
    given = [each["value"] for each in env if each["name"] in settings]
    assert given == ["500000000000", "0.5", "true", '[{"a":1}]']


def test_names_that_yaml_parses_as_other_types_stay_strings():
    values = merged(EVERYTHING, {"database": {"secret": "123"}, "serviceAccount": {"name": "true"}})
    names = ["123", "true", "null", "1e3", "team.a", "g" * 53]
    rendered = render_all([values] * len(names), names=names)
    objects = [each for one in rendered for each in one["objects"]]
    validate(objects)
    assert all(isinstance(each["metadata"]["name"], str) for each in objects)
    # A Service's name must be a DNS label.
    assert all(re.fullmatch(r"[-a-z0-9]{1,63}", each["metadata"]["name"]) for each in objects)


@pytest.mark.parametrize(
    ("store", "names"),
    [
        ("s3", {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}),
        ("azure", {"AZURE_STORAGE_ACCOUNT_KEY"}),
        ("gcs", {"GOOGLE_APPLICATION_CREDENTIALS"}),
        ("disk", set()),
    ],
)
def test_secret_of_the_bucket_reaches_servers_of_its_store_alone(store, names):
    blobs = {"store": store, "bucket": "graphs", "claim": "blobs"}
    values = {**SMALLEST, "blobs": blobs, "settings": {"AZURE_STORAGE_ACCOUNT_NAME": "team"}}
    without, given = (
        render(merged(values, {"blobs": {"credentialsSecret": name}})) for name in ("", "secret")
    )
    validate(given["objects"])
    for kind, name in (("Deployment", "graphstash"), ("Job", "graphstash-migrate")):
        before, after = (
            {each["name"] for each in container_of(rendered, kind, name)["env"]}
            for rendered in (without, given)
        )
        assert after - before == names
        pod = only(given["objects"], kind, name)["spec"]["template"]["spec"]
        secrets = [each["secret"] for each in pod["volumes"] if "secret" in each]
        mounts = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
        if store == "gcs":
            assert secrets == [{"secretName": "secret", "defaultMode": 0o440}]
            (path,) = (
                each["value"] for each in pod["containers"][0]["env"] if each["name"] in names
            )
            assert path == f"{mounts['google']['mountPath']}/credentials.json"
        else:
            assert secrets == []


def test_every_reference_names_an_existing_object():
    objects = render(EVERYTHING)["objects"]
    deployment = only(objects, "Deployment")
    pod = deployment["spec"]["template"]
    ports = {
        port["name"]: each["name"] for each in pod["spec"]["containers"] for port in each["ports"]
    }
    for service in (each for each in objects if each["kind"] == "Service"):
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports.keys()
    (path,) = only(objects, "Ingress")["spec"]["rules"][0]["http"]["paths"]
    (port,) = only(objects, "Service", path["backend"]["service"]["name"])["spec"]["ports"]
    assert port["name"] == path["backend"]["service"]["port"]["name"]
    monitor = only(objects, "ServiceMonitor")["spec"]
    servers = only(objects, "Service", "graphstash-servers")
    assert monitor["selector"]["matchLabels"].items() <= servers["metadata"]["labels"].items()
    assert [monitor["endpoints"][0]["port"]] == [each["name"] for each in servers["spec"]["ports"]]
    assert [
        each["metadata"]["name"]
        for each in objects
        if each["kind"] == "Service"
        and monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ] == ["graphstash-servers"]
    volumes = {each["name"] for each in pod["spec"]["volumes"]}
    for each in pod["spec"]["containers"]:
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
    accounts = [each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"]
    assert accounts == [pod["spec"]["serviceAccountName"]]
    assert (
        only(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "graphstash"
    )
    assert "replicas" not in deployment["spec"]
    config = only(objects, "ConfigMap", "graphstash-nginx")["data"]
    assert config["nginx.conf.template"] == (DOCKER / "nginx" / "nginx.conf.template").read_text()


def test_no_container_has_more_rights_than_it_needs():
    objects = render(EVERYTHING)["objects"]
    for each in (only(objects, "Deployment"), only(objects, "Job", "graphstash-migrate")):
        pod = each["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_notes_name_the_address_that_jobs_reach():
    assert "GRAPHSTASH_URL=http://graphstash.ml.svc." in render(SMALLEST)["notes"]
    values = merged(EVERYTHING, {"ingress": {"tlsSecret": "tls"}})
    assert "GRAPHSTASH_URL=https://cache.internal." in render(values)["notes"]


def test_files_of_the_page_are_accepted():
    files = {title: yaml.safe_load(text) for title, text in blocks().items()}
    values = files.pop("values.yaml")
    objects = render(values)["objects"]
    assert only(objects, "ServiceAccount")["metadata"]["annotations"]
    validate([files.pop("job.yaml")])
    names = ["values-azure.yaml", "values-gcs.yaml", "values-ingress.yaml", "values-oidc.yaml"]
    assert sorted(files) == names
    for more in files.values():
        validate(render(merged(values, more))["objects"])


# -- the rendered pods, as processes --


def container_of(rendered, kind="Deployment", name="graphstash"):
    containers = only(rendered["objects"], kind, name)["spec"]["template"]["spec"]["containers"]
    return containers[0]


class Pod:
    """Run the server of one pod, and its migration.

    Commands, environments and probes come from the chart. Addresses, ports, directories and secrets
    come from this host.
    """

    def __init__(self, rendered, directory, *, database, **secrets):
        self.rendered = rendered
        self.directory = directory
        self.port = reserved_port()
        self.image = Image()
        self.secrets = {"GRAPHSTASH_DATABASE_URL": database, **secrets}
        self.more = {"PYTHONDONTWRITEBYTECODE": ""}  # as in `Deployment`
        self.process = None
        (directory / "tmp").mkdir(parents=True)

    def environment(self, container):
        env = dict(self.image.environment)
        for each in container["env"]:
            if "valueFrom" in each:
                assert each["valueFrom"]["secretKeyRef"]["name"]
                env[each["name"]] = self.secrets[each["name"]]
            else:
                env[each["name"]] = self.substituted(each["value"])
        path = f"{sysconfig.get_path('scripts')}:{env['PATH']}"
        return {**env, "PATH": path, "HOME": str(self.directory / "tmp"), **self.more}

    def substituted(self, text):
        for name, value in {
            "/var/lib/graphstash": str(self.directory / "data"),
            "0.0.0.0": "127.0.0.1",
            "8077": str(self.port),
        }.items():
            text = text.replace(name, value)
        return text

    def exec(self, *command):
        """Run a command like `kubectl exec`."""
        return captured(command, env=self.environment(container_of(self.rendered)), timeout=120)

    def migrate(self):
        container = container_of(self.rendered, "Job", "graphstash-migrate")
        return captured(
            [*self.image.entrypoint, *container["args"]],
            env=self.environment(container),
            timeout=120,
        )

    def start(self):
        container = container_of(self.rendered)
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.image.entrypoint, *container["args"]],
                stdout=log,
                stderr=log,
                env=self.environment(container),
            )
        until(lambda: self.probe("startupProbe") or self.process.poll() is not None)
        assert self.process.poll() is None, (self.directory / "log").read_text()

    def probe(self, name):
        """Return whether a probe of the chart succeeds."""
        probe = container_of(self.rendered)[name]
        (port,) = container_of(self.rendered)["ports"]
        assert probe["httpGet"]["port"] == port["name"]
        assert port["containerPort"] == 8077
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{self.port}{probe['httpGet']['path']}",
                timeout=probe["timeoutSeconds"],
                trust_env=False,
            )
        except httpx.HTTPError:
            return False
        return answer.is_success

    def stop(self):
        """Send SIGTERM after the pod's hook, within the remaining grace. Return the exit code."""
        spec = only(self.rendered["objects"], "Deployment")["spec"]["template"]["spec"]
        waits = [each["lifecycle"]["preStop"]["exec"]["command"] for each in spec["containers"]]
        assert {command[0] for command in waits} == {"sleep"}
        left = spec["terminationGracePeriodSeconds"] - max(int(each[1]) for each in waits)
        shutdown = int(self.environment(spec["containers"][0])["GRAPHSTASH_SHUTDOWN_SECONDS"])
        assert left > shutdown + 10
        self.process.terminate()
        return self.process.wait(left)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def pod(tmp_path, compose_postgres):
    """Start pods of these values, by default with an empty database."""
    with contextlib.ExitStack() as stack:

        def start(values, database=None, **secrets):
            made = Pod(
                render(values),
                tmp_path / f"pod-{len(list(tmp_path.iterdir()))}",
                database=database or compose_postgres.new_database(template=EMPTY),
                **secrets,
            )
            return stack.enter_context(made)

        yield start


def put_and_get(pod, other=None):
    """Store a blob through a pod, and check that the other pod returns it."""
    made = pod.exec("graphstash", "token", "create", "--grant", "admin:*", "--description", "test")
    assert TOKEN_FORM.fullmatch(made.stdout.strip()), made.stderr
    headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
    path = str(ArtifactKey.parse("jax", "cpu", "0" * 64).artifact_path("default"))
    blob = os.urandom(400_000)
    with httpx.Client(headers=headers, trust_env=False, timeout=30) as http:
        digest = {"Repr-Digest": Digest.of(blob).repr_digest}
        put = http.put(f"http://127.0.0.1:{pod.port}{path}", content=blob, headers=digest)
        assert put.status_code == 201, put.text
        answer = http.get(f"http://127.0.0.1:{(other or pod).port}{path}")
    assert answer.content == blob
    return headers, path, blob


def test_servers_with_s3_need_the_migration_share_blobs_and_end_in_time(pod):
    with Moto() as moto:
        values = merged(
            SMALLEST,
            {
                "blobs": {"bucket": moto.new_bucket(), "credentialsSecret": "s3"},
                "settings": {
                    "GRAPHSTASH_S3_ENDPOINT_URL": moto.url,
                    "GRAPHSTASH_S3_ADDRESSING": "path",
                    "GRAPHSTASH_S3_REGION": CREDENTIALS["AWS_DEFAULT_REGION"],
                },
            },
        )
        first = pod(values, **CREDENTIALS)
        refused = first.exec("graphstash", "serve")
        assert refused.returncode != 0
        assert "graphstash migrate" in refused.stderr
        for _ in range(2):
            done = first.migrate()
            assert done.returncode == 0, done.stderr
        first.start()
        second = pod(values, first.secrets["GRAPHSTASH_DATABASE_URL"], **CREDENTIALS)
        second.start()
        assert all(first.probe(name) for name in ("readinessProbe", "livenessProbe"))

        put_and_get(first, second)
        assert (first.stop(), second.stop()) == (0, 0)


@pytest.mark.parametrize(
    ("store", "emulator"),
    [
        ("gcs", "fake_gcs"),
        pytest.param("azure", "azurite", marks=(pytest.mark.npm, pytest.mark.timeout(900))),
    ],
)
def test_servers_with_other_buckets_share_blobs(pod, request, store, emulator):
    emulator = request.getfixturevalue(emulator)
    account = {
        name: value for name, value in emulator.variables.items() if name.endswith("ACCOUNT_NAME")
    }
    values = {
        **SMALLEST,
        "blobs": {"store": store, "bucket": emulator.new_bucket()},
        "settings": account,
    }
    first = pod(values)
    second = pod(values, first.secrets["GRAPHSTASH_DATABASE_URL"])
    for each in (first, second):
        each.more |= emulator.variables  # the emulator's address and key
    assert first.migrate().returncode == 0
    first.start()
    second.start()
    put_and_get(first, second)
    assert (first.stop(), second.stop()) == (0, 0)


def test_lost_database_makes_a_pod_unready_but_does_not_restart_it(pod, compose_postgres):
    values = {"database": {"secret": "d"}, "blobs": {"store": "disk", "claim": "blobs"}}
    server = pod(values)
    assert server.migrate().returncode == 0
    server.start()
    compose_postgres.kill()
    try:
        until(lambda: not server.probe("readinessProbe"))
        assert server.probe("livenessProbe")
    finally:
        compose_postgres.start()
    until(lambda: server.probe("readinessProbe"))


def test_nginx_of_the_pod_sends_the_blobs_of_a_volume(pod, tmp_path):
    values = {
        "database": {"secret": "d"},
        "blobs": {"store": "disk", "claim": "blobs"},
        "nginx": {"enabled": True},
    }
    server = pod(values)
    assert server.migrate().returncode == 0
    server.start()
    deployment = only(server.rendered["objects"], "Deployment")
    described = deployment["spec"]["template"]["spec"]["containers"][1]
    given = {each["name"]: server.substituted(each["value"]) for each in described["env"]}
    config = only(server.rendered["objects"], "ConfigMap", "graphstash-nginx")["data"]
    read = set(re.findall(r"\$\{(GRAPHSTASH_[A-Z0-9_]+)\}", config["nginx.conf.template"]))
    assert read <= given.keys()
    variables = {name: value for name, value in given.items() if name.startswith("GRAPHSTASH_")}
    with Nginx(tmp_path / "nginx", variables=variables) as nginx:
        probe = described["readinessProbe"]["httpGet"]["path"]
        assert httpx.get(nginx.url + probe, trust_env=False).status_code == 200
        headers, path, blob = put_and_get(server)
        answer = httpx.get(nginx.url + path, headers=headers, trust_env=False, timeout=30)
        assert answer.content == blob
        assert nginx.has_sent(answer.headers["x-request-id"])


def test_job_of_the_page_exchanges_the_token_of_its_service_account(tmp_path):
    rules = yaml.safe_load(blocks()["values-oidc.yaml"])["settings"]["GRAPHSTASH_OIDC_ISSUERS"]
    described = yaml.safe_load(blocks()["job.yaml"])["spec"]["template"]["spec"]
    (container,) = described["containers"]
    (volume,) = (each for each in described["volumes"] if each["name"] == "token")
    (source,) = volume["projected"]["sources"]
    place = tmp_path / "token"
    with Cluster() as cluster:
        cluster.add_key("first")
        issuer = {**rules[0], "issuer": cluster.url}
        del issuer["jwks_url"], issuer["ca_file"]
        jwt = cluster.token(
            "first",
            aud=source["serviceAccountToken"]["audience"],
            **{
                "kubernetes.io": {
                    "namespace": "training",
                    "serviceaccount": {"name": described["serviceAccountName"]},
                }
            },
        )
        place.write_text(jwt)
        with Guarded(tmp_path / "server", oidc_issuers=[issuer]) as guarded:
            env = {each["name"]: each["value"] for each in container["env"]} | PATIENT_VARIABLES
            env |= {
                "GRAPHSTASH_URL": guarded.url,
                "GRAPHSTASH_TOKEN_FILE": str(tmp_path / "exchanged"),
                "GRAPHSTASH_CACHE_DIR": str(tmp_path / "cache"),
                "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
            }
            (tmp_path / "train.py").write_text("import graphstash; print(graphstash.stats())")
            script = container["args"][0].replace("/var/run/secrets/graphstash/token", str(place))
            done = captured([*container["command"], script], cwd=tmp_path, env=env, timeout=120)
            assert done.returncode == 0, done.stderr
            token = (tmp_path / "exchanged").read_text().strip()
            assert TOKEN_FORM.fullmatch(token)
            headers = {"Authorization": f"Bearer {token}"}
            access = httpx.get(f"{guarded.url}/v1/-/access", headers=headers, trust_env=False)
            grant = {"scope": "write", "namespaces": "trusted"}
            assert access.json()["grants"] == [grant]
