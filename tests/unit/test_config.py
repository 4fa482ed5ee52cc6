import dataclasses

import pytest

from graphstash import ClientConfig, ConfigError


def test_fields_are_read_from_their_variables_and_have_defaults(tmp_path):
    config = ClientConfig.load(
        {
            "GRAPHSTASH_URL": "http://cache:1/",
            "GRAPHSTASH_NAMESPACE": "team-a",
            "GRAPHSTASH_CACHE_DIR": str(tmp_path),
            "GRAPHSTASH_LOCAL_LIMIT": "2GiB",
            "GRAPHSTASH_READ_ONLY": "1",
            "GRAPHSTASH_WAIT_SECONDS": "7.5",
            "GRAPHSTASH_HOOKS": "torch_xla,other",
        }
    )
    assert (config.url, config.namespace, config.enabled) == ("http://cache:1", "team-a", True)
    assert (config.cache_dir, config.local_limit) == (tmp_path, 2 * 1024**3)
    assert (config.read_only, config.wait_seconds) == (True, 7.5)
    assert config.hooks == ("torch_xla", "other")
    config = ClientConfig.load({})
    assert (config.url, config.namespace, config.enabled) == ("", "default", True)
    assert config.hooks is None  # all registered hooks


def test_an_argument_wins_over_the_environment_and_none_does_not():
    environ = {"GRAPHSTASH_NAMESPACE": "from-environment"}
    assert ClientConfig.load(environ, namespace="given").namespace == "given"
    assert ClientConfig.load(environ, namespace=None).namespace == "from-environment"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("4096", 4096), ("4096b", 4096), ("0", 0), (4096, 4096), ("1.5k", 1500)),
        *(("500MB", 500_000_000), ("500 mb", 500_000_000), ("2GiB", 2 * 1024**3)),
        *((".5kib", 512), ("1TiB", 1024**4), ("3p", 3 * 10**15)),
    ],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert ClientConfig.load({}, local_limit=text).local_limit == size


@pytest.mark.parametrize(
    ("setting", "texts", "message"),
    [
        (
            "local_limit",
            ("", "1XB", "1.2.3k", "-1", "1e9", "inf", "k", "1 2", "\u0661k", "9" * 400, 10**400),
            "it takes a size such as 500MB or 10GiB",
        ),
        (
            "connect_seconds",
            ("0", "-1", "60.1", "nan", "inf", "-inf", "", "1,5", type(None), "9" * 400, 10**400),
            r"it takes a number \(above 0 to 60\)",
        ),
        (
            "publish_queue",
            ("2.5", 2.5, "many", "0", 4097, "9" * 400, 10**400),
            r"it takes a whole number \(1 to 4,096\)",
        ),
    ],
)
def test_invalid_numbers_are_refused(setting, texts, message):
    for text in texts:
        with pytest.raises(ConfigError, match=message):
            ClientConfig(**{setting: text})


def test_limit_of_a_number_is_valid_unless_it_is_exclusive():
    limits = {"connect_seconds": 60.0, "publish_queue": 1, "local_limit": 0}
    config = ClientConfig(**limits)
    assert limits == {name: getattr(config, name) for name in limits}
    assert ClientConfig(publish_queue=4096).publish_queue == 4096


@pytest.mark.parametrize(
    ("text", "value"), [("TRUE", True), ("on", True), (" 1 ", True), ("No", False), (False, False)]
)
def test_switch_accepts_common_spellings(text, value):
    assert ClientConfig(read_only=text).read_only is value


def test_every_wrong_setting_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        ClientConfig.load(
            {"GRAPHSTASH_WAIT_SECONDS": "long", "GRAPHSTASH_HOOKS": "", "X": "1"}, url=7
        )
    assert "GRAPHSTASH_WAIT_SECONDS='long'" in str(caught.value)
    assert "GRAPHSTASH_URL=7" in str(caught.value)


def test_unknown_setting_is_named_without_its_value():
    with pytest.raises(ConfigError, match="tokn") as caught:
        ClientConfig.load({}, tokn="hush")
    assert "hush" not in str(caught.value)


def test_secrets_are_masked():
    config = ClientConfig.load({}, token="hush" * 10)
    assert "hush" not in f"{config} {config!r} {dataclasses.asdict(config)}"
    assert dataclasses.replace(config, url="none").token.reveal() == "hush" * 10


def test_settings_report_which_were_set_explicitly():
    config = ClientConfig.load({"GRAPHSTASH_URL": "none", "GRAPHSTASH_JOB": ""}, namespace="team")
    assert config.given == {"url", "namespace"}
    assert config == ClientConfig(url="", namespace="team")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GRAPHSTASH_URL", "cache:8077", "expected http://host:port"),
        ("GRAPHSTASH_NAMESPACE", "Team A", "[a-z0-9][a-z0-9._-]{0,63}"),
        ("GRAPHSTASH_WAIT_SECONDS", "-1", "it takes a number (0 to 86,400)"),
        ("GRAPHSTASH_READ_ONLY", "perhaps", "it takes true or false"),
        ("GRAPHSTASH_SIGNATURES", "always", "it takes require, prefer or off"),
        ("GRAPHSTASH_TORCH_XLA_MODE", "magic", "auto, exact or hint"),
    ],
)
def test_invalid_setting_is_reported_with_variable_value_and_range(variable, value, message):
    with pytest.raises(ConfigError) as caught:
        ClientConfig.load({variable: value})
    assert variable in str(caught.value)
    assert value in str(caught.value)
    assert message in str(caught.value)
