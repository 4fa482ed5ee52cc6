"""`graphstash init`, and the config file that it writes for all jobs of a user."""

import os
import stat

import pytest
from typer.testing import CliRunner

from graphstash._cli.main import complete_app
from graphstash._user_file import read_user_file, user_file_path, write_user_file
from graphstash.config import ClientConfig
from support import processes
from support.waiting import PATIENT_VARIABLES

TOKEN = "gst_canarycanaryabcd_" + "CANARY0" * 6 + "x"
URL = "https://cache.internal"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a function that answers the prompts of `init` for a user without settings."""
    for name in [each for each in os.environ if each.startswith("GRAPHSTASH_")]:
        monkeypatch.delenv(name)
    for name, value in PATIENT_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "config" / "graphstash" / "config.toml"


def init(*answers, arguments=()):
    text = "".join(f"{each}\n" for each in answers)
    return CliRunner().invoke(complete_app(), ["init", *arguments], input=text)


def test_init_stores_tested_answers_privately_and_jobs_use_them(home, guarded, namespace):
    token = guarded.token(f"write:{namespace}")
    done = init(guarded.url, token)
    assert done.exit_code == 1  # the doctor: the token does not grant the namespace `default`
    assert stat.S_IMODE(home.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700
    assert read_user_file(os.environ).values == {"url": guarded.url, "token": token}
    for line in (f"GRAPHSTASH_URL={guarded.url}", "GRAPHSTASH_TOKEN=<the token, as a secret>"):
        assert f"    {line}\n" in done.stdout
    assert f"token and url from {home}" in done.stdout
    assert token not in done.output
    status = processes.graphstash("status", "--namespace", namespace)
    assert (status.returncode, status.stderr) == (0, "")

    again = init("", guarded.token("write:*"))  # the stored address is the default
    assert again.exit_code == 0, again.output
    assert read_user_file(os.environ).values["token"] != token
    assert [each.name for each in home.parent.iterdir()] == [home.name]


def test_init_stores_no_answer_that_the_server_refuses(home, guarded):
    for answers, text in (
        ((guarded.url, TOKEN), "the server rejected the token from `graphstash init`"),
        ((guarded.url, "two words"), "expected a token without spaces"),
        (("http://127.0.0.1:9",), "127.0.0.1:9"),
        (("cache",), "expected http://host:port"),
        (("none",), "nothing was stored"),
    ):
        done = init(*answers)
        assert done.exit_code == 1
        assert text in done.output
        assert "CANARY" not in done.output
        assert not home.exists()
    assert init("http://127.0.0.1:9", arguments=["http://127.0.0.1:9"]).exit_code == 1


def test_invalid_address_is_named_as_the_user_gave_it(home):
    for done, status in ((init(arguments=["ftp://x"]), 2), (init("ftp://x"), 1)):
        assert done.exit_code == status
        assert "'ftp://x': expected http://host:port" in done.output
        assert "GRAPHSTASH_URL" not in done.output
    assert not home.exists()


def test_init_without_answers_says_what_to_pass(home, guarded):
    for arguments in ([], [guarded.url]):
        done = init(arguments=arguments)
        assert done.exit_code == 2
        assert "`graphstash init URL`" in done.output
        assert "set GRAPHSTASH_URL and GRAPHSTASH_TOKEN" in done.output
    assert not home.exists()


def test_server_that_needs_no_token_is_stored_without_one(home, server):
    done = init(arguments=[server.url])
    assert done.exit_code == 0, done.output
    assert read_user_file(os.environ).values == {"url": server.url}


def test_options_and_environment_precede_file_and_token_goes_only_to_its_server(home):
    write_user_file(home, {"url": URL, "token": TOKEN})

    def load(**variables):
        given = {f"GRAPHSTASH_{name.upper()}": value for name, value in variables.items()}
        config = ClientConfig.load(os.environ | given)
        return config.url, config.token and config.token.reveal(), config.of_file

    assert load() == (URL, TOKEN, {"url", "token"})
    assert load(url=URL + "/") == (URL, TOKEN, {"token"})
    assert load(url="http://elsewhere:1") == ("http://elsewhere:1", None, set())
    assert load(url="none") == ("", None, set())
    assert load(token="own") == (URL, "own", {"url"})
    assert load(token_file="/a/file") == (URL, None, {"url"})
    assert ClientConfig.load(url="http://elsewhere:1").token is None
    assert ClientConfig.load({}).token is None
    output = processes.graphstash_here("doctor", "--url", "http://127.0.0.1:9").stdout
    assert f"not used: token and url from {home}, because the command line" in output


def damage(home, how):
    write_user_file(home, {"url": URL, "token": TOKEN})
    match how:
        case "readable by others":
            home.chmod(0o640)
        case "not TOML":
            home.write_text(f'token = "{TOKEN}\n')
        case "not UTF-8":
            home.write_bytes(b"\xff")
        case "invalid address":
            write_user_file(home, {"url": "cache", "token": TOKEN})
        case "token without address":
            write_user_file(home, {"token": TOKEN})
        case "other settings":
            write_user_file(home, {"url": URL, "trusted_keys": "/x"})
        case "too large":
            home.write_text("#" * 10**6)
        case "directory":
            home.unlink()
            home.mkdir()
        case "pipe":
            home.unlink()
            os.mkfifo(home, 0o600)


@pytest.mark.parametrize(
    "how",
    [
        *("readable by others", "not TOML", "not UTF-8", "invalid address"),
        *("token without address", "other settings", "too large", "directory", "pipe"),
    ],
)
def test_damaged_file_is_a_warning_once_and_no_more(home, how):
    damage(home, how)
    program = "import graphstash, subprocess, sys; graphstash.install(); print('trained'); "
    program += "len(sys.argv) > 1 or subprocess.run([sys.executable, '-c', sys.orig_argv[2], 'x'])"
    job = processes.python(program, check=True, GRAPHSTASH_URL="none")
    assert job.stdout == "trained\n" * 2
    (line,) = job.stderr.splitlines()
    assert str(home) in line or "the file of `graphstash init`" in line
    assert "CANARY" not in line
    command = processes.graphstash_here("status", GRAPHSTASH_URL="http://127.0.0.1:9")
    assert command.stderr.count("does not answer") == 1
    output = processes.graphstash_here("doctor", GRAPHSTASH_URL="http://127.0.0.1:9").stdout
    assert "run `graphstash init` to replace the file" in output


def test_file_of_environment_without_home_does_not_exist():
    assert user_file_path({}) is None
    assert user_file_path({"XDG_CONFIG_HOME": "relative"}) is None
    assert str(user_file_path({"HOME": "/h"})) == "/h/.config/graphstash/config.toml"
    assert read_user_file({}) == ({}, "")
