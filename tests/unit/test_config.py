import pytest

from graphstash import ClientConfig, ConfigError


def test_defaults_need_no_environment():
    config = ClientConfig.load({})
    assert config.url == ""  # and no server of this user
    assert config.namespace == "default"
    assert config.enabled
    assert config.hooks == ("torch_xla", "pjrt", "jax", "inductor", "triton")


def test_every_field_is_read_from_its_variable(tmp_path):
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
    assert config.url == "http://cache:1"
    assert config.namespace == "team-a"
    assert config.cache_dir == tmp_path
    assert config.local_limit == 2 * 1024**3
    assert config.read_only
    assert config.wait_seconds == 7.5
    assert config.hooks == ("torch_xla", "other")


def test_an_argument_wins_over_the_environment_and_none_does_not():
    environ = {"GRAPHSTASH_NAMESPACE": "from-environment"}
    assert ClientConfig.load(environ, namespace="given").namespace == "given"
    assert ClientConfig.load(environ, namespace=None).namespace == "from-environment"


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("GRAPHSTASH_URL", "cache:8077", "expected http://host:port"),
        ("GRAPHSTASH_NAMESPACE", "Team A", "[a-z0-9][a-z0-9._-]{0,63}"),
        ("GRAPHSTASH_WAIT_SECONDS", "-1", "it takes a number (0 to 86,400)"),
        ("GRAPHSTASH_CONNECT_SECONDS", "soon", "it takes a number (above 0 to 60)"),
        ("GRAPHSTASH_LOCAL_LIMIT", "many", "it takes a size such as 500MB or 10GiB"),
        ("GRAPHSTASH_TORCH_XLA_MODE", "magic", "auto, exact or hint"),
    ],
)
def test_a_setting_that_cannot_be_used_names_variable_value_and_range(variable, value, told):
    with pytest.raises(ConfigError) as caught:
        ClientConfig.load({variable: value})
    assert variable in str(caught.value)
    assert value in str(caught.value)
    assert told in str(caught.value)
