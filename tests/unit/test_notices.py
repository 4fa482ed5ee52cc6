"""A job logs notices about its settings, each notice once."""

from graphstash import ClientConfig
from graphstash._process.notices import notices, unknown_variables

REMOTE = "http://cache.internal:8077"


def notices_of(environ=None, **settings):
    return list(notices(ClientConfig.load({}, **settings), environ or {}))


def test_job_that_loads_unsigned_artifacts_of_remote_server_logs_warning(tmp_path):
    (notice,) = notices_of(url=REMOTE, read_namespaces="ci", namespace="me")
    assert "can run code in it" in notice
    assert "(ci, me)" in notice
    assert REMOTE in notice
    assert notices_of(url=REMOTE, trusted_keys=tmp_path / "keys") == []
    for here in ("http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1", "unix:/run/it"):
        assert notices_of(url=here) == []


def test_job_without_server_logs_notice_unless_configured():
    (notice,) = notices_of()
    assert "GRAPHSTASH_URL" in notice
    assert "graphstash serve" in notice
    assert notices_of(url="none") == []


def test_unknown_hook_is_named_with_the_existing_hooks():
    (notice,) = notices_of(url="none", hooks="jax,jx")
    assert notice == (
        "GRAPHSTASH_HOOKS: unknown hook jx, ignored; did you mean jax? "
        "Use inductor, jax, pjrt, torch_xla, triton"
    )


def test_unknown_variables_are_logged_with_similar_setting():
    environ = {"GRAPHSTASH_NAMESPCE": "a", "GRAPHSTASH_DATA_DIR": "/x", "GRAPHSTASH_AUTOLOAD": "1"}
    assert unknown_variables(environ) == {
        "GRAPHSTASH_DATA_DIR": None,
        "GRAPHSTASH_NAMESPCE": "GRAPHSTASH_NAMESPACE",
    }
    misspelled, other = notices_of(environ, url="none")
    assert "GRAPHSTASH_NAMESPCE (did you mean GRAPHSTASH_NAMESPACE?)" in misspelled
    assert other == "ignored, because jobs have no such settings: GRAPHSTASH_DATA_DIR"
