"""Runs `graphstash` several times in one process, because the import of JAX takes seconds."""

import argparse
import json
from pathlib import Path

from typer.testing import CliRunner

from graphstash._cli.main import app

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("commands", type=json.loads, help="a list of lists of words")
options = parser.parse_args()

results = []
for words in options.commands:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    results.append([result.exit_code, result.stdout, result.stderr])
options.report.write_text(json.dumps(results))
