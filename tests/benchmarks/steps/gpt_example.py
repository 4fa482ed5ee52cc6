"""The GPT of the examples, started as `Jobs` starts a script: gpt_example.py REPORT [OPTIONS]."""

import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "client" / "examples" / "train_gpt.py"

sys.argv = [str(EXAMPLE), "--report", *sys.argv[1:]]
runpy.run_path(str(EXAMPLE), run_name="__main__")
