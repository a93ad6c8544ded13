#!/bin/sh
# Makes .venv with everything that the demo and the tests need. Safe to run again: does nothing
# unless pyproject.toml is newer than the last set-up.
set -eu
cd "$(dirname "$0")/.."
extras=${1:-demo,test}
stamp=.venv/.ready-$(echo "$extras" | tr ',' '-')
[ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && exit 0

new_enough() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

find_python() {
    pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
    for candidate in "${PYTHON:-}" python3.12 python3.13 python3.14 python3 \
        "$pyenv_root"/versions/3.12*/bin/python "$pyenv_root"/versions/3.1[3-9]*/bin/python; do
        [ -n "$candidate" ] && new_enough "$candidate" && { echo "$candidate"; return; }
    done
    return 1
}

if [ ! -x .venv/bin/python ]; then
    if python=$(find_python); then
        "$python" -m venv .venv
    elif command -v uv >/dev/null; then
        uv venv --quiet --seed --python 3.12 .venv
    else
        echo "error: no Python 3.12 or newer found: install python3.12 with its venv module, or uv, or set PYTHON" >&2
        exit 2
    fi
fi
echo "installing pw-jax[$extras] into .venv" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
touch "$stamp"
