"""Render the chart in docker/helm, and check the objects against the API schemas of Kubernetes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from support.compose import DOCKER
from support.environments import python_of
from support.processes import captured

CHART = DOCKER / "helm"
VERSIONS = ("1.25", "1.31", "1.37")
"""Kubernetes versions: the oldest that the chart accepts, one between, and the newest with a
schema."""

# Helm's library logs the files that it reads to standard error. Objects of the Prometheus operator
# have no schema here.
_PROGRAM = """
import json, sys
import helm_python, kubernetes_validate, yaml

asked = json.load(sys.stdin)
chart = helm_python.Chart.load(asked["chart"])
rendered = []
for name, values in asked["charts"]:
    try:
        files = chart.render(values, name=name, namespace="ml")
    except helm_python.HelmError as error:
        rendered.append(str(error))
        continue
    rendered.append({"notes": "", "objects": []})
    for path, text in files.items():
        if path.endswith("NOTES.txt"):
            rendered[-1]["notes"] = text
        else:
            rendered[-1]["objects"] += [each for each in yaml.safe_load_all(text) if each]
problems = helm_python.lint(asked["chart"])["errors"]
for version in asked["versions"]:
    for each in asked["objects"]:
        if each["apiVersion"] == "monitoring.coreos.com/v1":
            continue
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except Exception as error:
            problems.append(f"{each['kind']} in {version}: {error}")
json.dump({"rendered": rendered, "problems": problems}, sys.stdout)
"""


class HelmError(Exception):
    """Helm refuses the values, with this message."""


def render(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `objects` and the `notes` of an installation in the namespace `ml`.

    Raises:
        HelmError: Helm refuses the values.
    """
    (rendered,) = render_all([values])
    if isinstance(rendered, str):
        raise HelmError(rendered)
    return rendered


def render_all(
    values: Iterable[Mapping[str, Any]], *, names: Iterable[str] = repeat("graphstash")
) -> list[Any]:
    """Return the result of `render`, or the text of Helm's refusal, for each set of values.

    Args:
        names: names of the installations.
    """
    rendered: list[Any] = _run(charts=list(zip(names, values, strict=False)), objects=[])[
        "rendered"
    ]
    return rendered


def validate(objects: Sequence[Mapping[str, Any]]) -> None:
    """Require that the objects are valid, without unknown fields, in all `VERSIONS`."""
    _run(charts=[], objects=objects)


def _run(**asked: object) -> dict[str, Any]:
    done = captured(
        [str(python_of("helm")), "-c", _PROGRAM],
        input=json.dumps({"chart": str(Path(CHART)), "versions": VERSIONS, **asked}),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert not answer["problems"], answer["problems"]
    return answer
