#!/bin/sh
# Builds the wheel and installs the server from it: install.sh SOURCE VENV [PYTHON]
#
# The Dockerfile runs this, and so does a test where there is no Docker. uv must be in the PATH.
# SOURCE is a checkout, VENV is made anew, the versions are those of constraints.txt.
set -eu

source=$1
venv=$2
python=${3:-python3}

dist=$(mktemp -d)
trap 'rm -rf "$dist"' EXIT

uv build --quiet --wheel --build-constraints "$source/constraints.txt" --out-dir "$dist" "$source"
uv venv --quiet --python "$python" "$venv"
# Compiled here: at run time the file system is read-only.
uv pip install --quiet --compile-bytecode --python "$venv/bin/python" \
    --constraint "$source/constraints.txt" "$(echo "$dist"/*.whl)[server,s3,gcs,azure,postgres,tracing]"
