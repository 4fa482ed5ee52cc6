"""A setting is declared once: its option, variable, help, reference and doctor line follow."""

import shutil
from pathlib import Path

from support import processes

ROOT = Path(__file__).parents[2]

_CLIENT = (
    "    url: str = setting(",
    '''    spare_tyres: int = setting(4, whole(least=0, most=9), Option())
    """Tyres to carry."""
    url: str = setting(''',
)
_SERVER = (
    "    host: Annotated[",
    '''    spare_wheels: Annotated[int, Option()] = Field(3, le=8)
    """Wheels to carry."""
    host: Annotated[''',
)

_PROGRAM = """
    import os, sys
    from reference import _client_settings, _command_line, _server_settings
    from graphstash import ClientConfig
    from graphstash._cli import launcher
    from graphstash._cli.doctor.settings import check_settings
    from graphstash_server.errors import StartError
    from graphstash_server.settings import load_settings

    variable = {"GRAPHSTASH_SPARE_TYRES": "5"}
    assert ClientConfig.load({}).spare_tyres == 4
    assert ClientConfig.load(variable).spare_tyres == 5
    assert launcher.read(["--spare-tyres", "6", "true"]).settings == {"spare_tyres": "6"}
    assert "GRAPHSTASH_SPARE_TYRES from the environment" in str(list(check_settings(variable, {})))
    assert "--spare-tyres from the command" in str(list(check_settings({}, {"spare_tyres": "7"})))
    row = "| `GRAPHSTASH_SPARE_TYRES` | `4` | 0 to 9 | `--spare-tyres` | Tyres to carry. |"
    assert row in _client_settings()
    run = _command_line().partition("## `graphstash run`")[2]
    assert "`--spare-tyres SPARE_TYRES` | Tyres to carry. Default: `4`. |" in run

    assert load_settings().spare_wheels == 3
    assert load_settings(spare_wheels="4").spare_wheels == 4
    os.environ["GRAPHSTASH_SPARE_WHEELS"] = "9"
    try:
        load_settings()
    except StartError as error:
        assert "GRAPHSTASH_SPARE_WHEELS=9 is not valid" in str(error)
    row = "| `GRAPHSTASH_SPARE_WHEELS` | `3` | 0 to 8 | `--spare-wheels` | Wheels to carry. |"
    assert row in _server_settings()
    serve = _command_line().partition("## `graphstash serve`")[2]
    assert "`--spare-wheels SPARE_WHEELS` | Wheels to carry. Default: `3`. |" in serve

    sys.argv = ["graphstash", "run", "--spare-tyres", "10", "true"]
    from graphstash.__main__ import main
    main()
"""


def test_new_setting_with_option_needs_only_its_declaration(tmp_path):
    """Its use, a test and the changelog are the other files of such a change."""
    for package, module, (before, after) in (
        ("client/graphstash", "config.py", _CLIENT),
        ("service/graphstash_server", "settings.py", _SERVER),
    ):
        copy = shutil.copytree(ROOT / package, tmp_path / Path(package).name)
        text = (copy / module).read_text(encoding="utf-8")
        assert text.count(before) == 1
        (copy / module).write_text(text.replace(before, after), encoding="utf-8")

    paths = f"{tmp_path}:{ROOT / 'docs' / 'tools'}"
    result = processes.python(_PROGRAM, PYTHONPATH=paths)

    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr == (
        "graphstash: error: --spare-tyres='10': it takes a whole number (0 to 9)\n"
    )
