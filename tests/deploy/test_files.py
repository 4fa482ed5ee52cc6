"""The files of docker/ are well-formed, pinned, locked down, and consistent with each other."""

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose

from graphstash_server.settings import Settings
from support.compose import DOCKER, Image, example_variables, load, variables_of
from support.processes import captured

COMBINATIONS = {
    "disk": ("compose.yaml",),
    "s3": ("compose.yaml", "compose.s3.yaml"),
    "tls": ("compose.yaml", "compose.tls.yaml"),
    "both": ("compose.yaml", "compose.s3.yaml", "compose.tls.yaml"),
    "observe": ("compose.yaml", "compose.observe.yaml"),
}
ALL = ("compose.yaml", "compose.s3.yaml", "compose.tls.yaml", "compose.observe.yaml")
NEEDED = {
    "GRAPHSTASH_DATABASE_PASSWORD": "secret",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "GRAPHSTASH_TLS_CERTIFICATE": "/tls/crt",
    "GRAPHSTASH_TLS_KEY": "/tls/key",
    "GRAPHSTASH_GRAFANA_PASSWORD": "secret",
}


@pytest.fixture(scope="module")
def image():
    return Image()


@pytest.fixture(params=COMBINATIONS)
def composed(request):
    return load(*COMBINATIONS[request.param], variables=NEEDED)


def without_extensions(composed):
    return {name: value for name, value in composed.items() if not name.startswith("x-")}


def test_compose_files_follow_the_specification(composed):
    parsed = PyCompose.from_yaml(yaml.safe_dump(without_extensions(composed)))

    assert sorted(parsed.service_names()) == sorted(composed["services"])


def test_files_that_services_name_exist(composed):
    services = composed["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        assert set(service.get("networks", ())) <= set(composed["networks"]), name
        assert set(service.get("secrets", ())) <= set(composed.get("secrets", ())), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            known = (DOCKER / source).is_file() if source.startswith(".") else True
            assert known, volume
            assert source.startswith(".") or source in composed["volumes"], volume
        for target, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "test" in services[target]["healthcheck"], f"{name} waits for {target}"
            if how["condition"] == "service_completed_successfully":
                assert services[target].get("restart", "no") == "no", target


def test_example_explains_exactly_the_variables_that_compose_reads():
    assert set(example_variables()) == variables_of(*ALL)


def test_example_shows_the_defaults():
    """Uncommenting a line changes nothing."""
    needed = dict.fromkeys(NEEDED, "x")

    shown = load(*ALL, variables={**example_variables(), **needed})

    assert shown == load(*ALL, variables=needed)


@pytest.mark.parametrize("name", NEEDED)
def test_variable_without_default_is_required(name):
    given = {**NEEDED, name: ""}

    with pytest.raises(KeyError, match=name):
        load(*ALL, variables=given)


def test_servers_get_only_existing_settings_and_those_of_identity_providers(composed):
    services = composed["services"]
    known = {f"GRAPHSTASH_{field.upper()}" for field in Settings.model_fields}
    oidc = {name for name in known if name.startswith("GRAPHSTASH_OIDC_")}
    for name in ("server-1", "server-2", "migrate"):
        given = {each for each in services[name]["environment"] if each.startswith("GRAPHSTASH_")}
        assert given <= known, name
        assert oidc <= given or name == "migrate"


def test_images_are_pinned_by_version(composed):
    for name, service in composed["services"].items():
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+[\w.-]*", service["image"]), name
        if service["image"].startswith("graphstash:"):
            assert service["pull_policy"] == "never", "a stranger may own the name in a registry"


def test_containers_are_locked_down(composed):
    for name, service in composed["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        if name != "s3":  # not our image, and not tried with a read-only root
            assert service["read_only"] is True, name
            assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name


def test_podman_accepts_every_tmpfs(composed):
    """Docker also accepts uid and gid, but podman fails on them."""
    for name, service in composed["services"].items():
        for tmpfs in service.get("tmpfs", ()):
            options = tmpfs.partition(":")[2].split(",")
            assert {each.partition("=")[0] for each in options} <= {"size", "mode"}, name
            assert "mode=1777" in options, f"{name}: otherwise only root can write to it"


def test_only_nginx_and_grafana_are_published_and_only_on_loopback(composed):
    published = {
        name: each["ports"] for name, each in composed["services"].items() if "ports" in each
    }

    with_page = {"grafana": ["127.0.0.1:3000:3000"]} if "grafana" in composed["services"] else {}
    assert published == {"nginx": ["127.0.0.1:8077:8080"], **with_page}
    assert composed["networks"]["back"]["internal"] is True
    assert not (composed["networks"]["out"] or {}).get("internal", False)  # to identity providers
    others = {
        "nginx": {"front", "back"},
        "server-1": {"out", "back"},
        "server-2": {"out", "back"},
        "prometheus": {"back", "observe"},
        "grafana": {"front", "observe"},
    }
    for name, service in composed["services"].items():
        assert set(service["networks"]) == others.get(name, {"back"}), name


def test_every_lasting_service_has_health_check_limits_and_grace_period(composed):
    for name, service in composed["services"].items():
        if name in {"migrate", "bucket"}:
            continue
        assert service["restart"] == "unless-stopped", name
        assert "test" in service["healthcheck"], name
        assert "mem_limit" in service, name
        assert "max-size" in service["logging"]["options"], name
        assert int(service["stop_grace_period"].rstrip("s")) > 30, name
        shutdown = service.get("environment", {}).get("GRAPHSTASH_SHUTDOWN_SECONDS", 0)
        assert int(service["stop_grace_period"].rstrip("s")) > int(shutdown) + 10, name


def test_both_servers_differ_only_in_their_address():
    services = load("compose.yaml", variables=NEEDED)["services"]
    one, two = services["server-1"], services["server-2"]

    assert {name for name in one if one[name] != two[name]} == {"networks"}
    for number, server in (("1", one), ("2", two)):
        address = server["networks"]["back"]["ipv4_address"]
        port = server["environment"]["GRAPHSTASH_PORT"]
        assert (
            services["nginx"]["environment"][f"GRAPHSTASH_SERVER_{number}"] == f"{address}:{port}"
        )


def test_nginx_mounts_the_volume_of_the_servers_read_only():
    services = load("compose.yaml", variables=NEEDED)["services"]
    server, nginx = services["server-1"], services["nginx"]

    assert server["volumes"] == ["data:/var/lib/graphstash"]
    assert "data:/var/lib/graphstash:ro" in nginx["volumes"]
    data_dir = server["environment"]["GRAPHSTASH_DATA_DIR"]
    assert nginx["environment"]["GRAPHSTASH_BLOB_DIR"] == f"{data_dir}/blobs"
    assert nginx["user"] == server["user"]


def test_with_s3_each_server_has_its_own_tier_and_nginx_sends_no_files():
    services = load("compose.yaml", "compose.s3.yaml", variables=NEEDED)["services"]

    assert services["server-1"]["volumes"] == ["tier-1:/var/lib/graphstash"]
    assert services["server-2"]["volumes"] == ["tier-2:/var/lib/graphstash"]
    assert services["nginx"]["environment"]["GRAPHSTASH_ACCEL"] == ""


def test_nginx_gets_every_variable_of_its_templates():
    services = load("compose.yaml", "compose.tls.yaml", variables=NEEDED)["services"]
    given = services["nginx"]["environment"]
    pattern = re.compile(given["NGINX_ENVSUBST_FILTER"])
    for template in (DOCKER / "nginx").glob("*.template"):
        for name in re.findall(r"\$\{(\w+)\}", template.read_text()):
            assert name in given, name
            assert pattern.search(name), name


def test_dockerfile_passes_hadolint():
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = captured([hadolint, "--no-color", DOCKER / "Dockerfile"])

    assert (done.returncode, done.stdout) == (0, "")


def test_dockerfile_uses_only_pinned_base_images_and_no_secrets(image):
    arguments = dict(each.split("=", 1) for name, each in image.instructions if name == "ARG")
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", arguments["PYTHON_IMAGE"])
    bases = {rest.split()[0] for name, rest in image.instructions if name == "FROM"}
    assert bases == {"${PYTHON_IMAGE}"}
    assert not [name for name, _ in image.instructions if name == "ADD"]
    text = (DOCKER / "Dockerfile").read_text()
    assert "apt-get" not in text
    assert not re.search(r"(?i)password|secret|token|database_url", text)


def test_image_runs_as_the_user_of_compose_without_a_shell(image):
    services = load("compose.yaml", variables=NEEDED)["services"]
    for name in ("server-1", "server-2", "migrate"):
        assert services[name]["user"] == image.user
    assert image.entrypoint == ["graphstash"]
    assert image.command == ["serve"] == services["server-1"]["command"]
    assert image.healthcheck[:2] == ["python", "-I"]


def test_image_requires_tokens_unless_two_options_disable_them(image):
    environment = {"PATH": os.environ["PATH"], **image.environment, "GRAPHSTASH_AUTH": "none"}
    assert not {"GRAPHSTASH_AUTH", "GRAPHSTASH_INSECURE"} & set(image.environment)
    environment["PATH"] = f"{sysconfig.get_path('scripts')}:{environment['PATH']}"

    refused = captured([*image.entrypoint, *image.command], env=environment)

    assert refused.returncode != 0
    assert "--insecure" in refused.stderr


def test_build_context_holds_only_the_sources_of_the_wheel():
    lines = (DOCKER.parent / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}

    assert "*" in lines
    assert kept == {
        *("constraints.txt", "pyproject.toml", "LICENSE", "README.md", "migrations"),
        *("client/graphstash", "service/graphstash_server", "schema/graphstash_schema"),
        "docker/install.sh",
    }
    assert all((DOCKER.parent / name).exists() for name in kept)


@pytest.mark.parametrize("broken", ["info", "compose version"])
def test_without_an_engine_make_reports_the_image_tests_as_not_run(tmp_path, broken):
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\ntest "$*" != "{broken}"\n')
    docker.chmod(0o755)
    make = ["make", "--silent", "--directory", str(DOCKER.parent), ".test-images"]

    done = captured(make, check=True, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    assert done.stdout.startswith("NOT RUN: tests/deploy/test_images.py")
    assert "no container engine" in done.stdout


def test_folders_of_the_tests_shadow_no_package():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import docker, packaging, json;"
        "print(json.dumps([*docker.__path__, *packaging.__path__]))"
    )
    tests = str(Path(__file__).parents[1])
    found = captured([sys.executable, "-I", "-c", program, tests], check=True).stdout

    assert tests not in "".join(json.loads(found))
