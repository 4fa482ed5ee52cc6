# Start of a page's session. tests/support/snippets.py appends the page's blocks.
# Sourced with SNIPPET_ROOT, _VENV, _HOME, _PORT and _CHECKERS in the environment.
set -eu -o pipefail

_server=

_end_server() {
    [ -z "$_server" ] || { kill "$_server"; wait "$_server" || true; }
    _server=
}
trap _end_server EXIT

# Users run the server in a terminal of its own. A second server replaces the first.
_serve() {
    _end_server
    rm -f "$HOME/port"
    GRAPHSTASH_PORT=$SNIPPET_PORT "$SNIPPET_VENV/graphstash" "$@" --port-file "$HOME/port" \
        >>"$HOME/server.log" 2>&1 &
    _server=$!
    until [ -s "$HOME/port" ]; do
        kill -0 "$_server" 2>/dev/null || { cat "$HOME/server.log" >&2; return 1; }
        sleep 0.05
    done
}

graphstash() {
    if [ "${1-}" = serve ]; then _serve "$@"; else command graphstash "$@"; fi
}

# Require that the installed packages and their extras exist.
pip() {
    local told
    told=$(HOME=$SNIPPET_HOME "$SNIPPET_VENV/python" -m uv pip "$@" \
        --dry-run --python "$SNIPPET_VENV/python" 2>&1) || { echo "$told" >&2; return 1; }
    case $told in *"does not have an extra"*) echo "$told" >&2; return 1 ;; esac
}

make() {
    command make --dry-run --directory "$SNIPPET_ROOT" "$@" >/dev/null
}

docker() {
    echo "no test starts containers: use <!-- snippet: parse: needs containers -->" >&2
    return 1
}

# Run the block in the file $1 with checkers instead of all programs.
_only_parse() (
    unset -f docker graphstash make pip
    cd() { :; }
    PATH=$SNIPPET_CHECKERS
    hash -r
    # shellcheck disable=SC1090
    . "$1"
)

_fail_unless() {
    [ "$1" = "$2" ] || { echo "the status is $2, the page says $1" >&2; exit 1; }
}
