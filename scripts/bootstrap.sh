#!/bin/sh
# Make or refresh the virtual environment: scripts/bootstrap.sh run|dev
#   VENV    folder of the environment (.venv)
#   PYTHON  interpreter to make it with (python3; 3.11 to 3.13)
#   TORCH   how pip shall install torch, before all else (torch==2.13.0); empty: no torch, no torch engine
# Needs python3 only, no rights, and nothing installed beside it. Does nothing when the environment is up to date.
set -eu

kind=${1:?usage: scripts/bootstrap.sh run|dev}
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
TORCH=${TORCH-torch==2.13.0}
cd "$(dirname "$0")/.."

case $kind in
    run) extras=index,models,nats,nkeys ;;
    dev) extras=index,models,nats,nkeys,bench,dev ;;
    *) echo "bootstrap: unknown kind '$kind'" >&2; exit 2 ;;
esac
[ -z "$TORCH" ] || extras=torch,$extras

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
fail() { echo "bootstrap: $*" >&2; exit 1; }

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

find_python() {
    for candidate in "$PYTHON" python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && usable "$candidate"; then echo "$candidate"; return; fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found; give one with PYTHON=/path/to/python3"
}

# The wanted state, in one line; each kind leaves it in a stamp file when it is reached.
wanted() { { cat pyproject.toml; echo "$1 $TORCH $PWD"; } | sha256sum | cut -c 1-64; }
current() { [ -x "$VENV/bin/kvbus" ] && [ "$(cat "$VENV/.kvbus-$1" 2>/dev/null)" = "$(wanted "$1")" ]; }

# Debian and Ubuntu keep ensurepip in a package of its own (python3-venv). Without it, and without the rights to install it, pip
# comes from the distribution's wheel of pip, fetched by apt with all its files in a private folder.
pip_wheel() {
    found=$(ls /usr/share/python-wheels/pip-*.whl 2>/dev/null | head -n 1)
    if [ -n "$found" ]; then echo "$found"; return; fi
    command -v apt-get >/dev/null || return 1
    mkdir -p "$1/state/lists/partial" "$1/cache/archives/partial" "$1/root"
    apt() { apt-get -qq -o Dir::State="$1/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$1/cache" \
        -o APT::Sandbox::User=root -o Debug::NoLocking=1 "$2" $3 >&2; }
    apt "$1" update "" || return 1
    (cd "$1" && apt "$1" download python3-pip-whl) || return 1
    for package in "$1"/*.deb; do dpkg -x "$package" "$1/root" || return 1; done
    ls "$1"/root/usr/share/python-wheels/pip-*.whl | head -n 1
}

make_venv() {
    python=$(find_python)
    say "making the virtual environment $VENV with $("$python" --version)"
    rm -rf "$VENV"
    if "$python" -c 'import venv; from ensurepip import bootstrap' 2>/dev/null; then
        "$python" -m venv "$VENV"
        return
    fi
    "$python" -c 'import venv' 2>/dev/null || fail "$python has no module venv: install it (on Debian and Ubuntu: apt install python3-venv)"
    say "$python has no ensurepip; taking pip from the distribution's package"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT INT TERM
    wheel=$(pip_wheel "$scratch") || wheel=
    [ -n "$wheel" ] || fail "no way to get pip: as root, run 'apt install python3-venv', then try again"
    "$python" -m venv --without-pip "$VENV"
    "$VENV/bin/python" "$wheel/pip" install --quiet --no-index --no-deps "$wheel"
}

if current dev || { [ "$kind" = run ] && current run; }; then exit 0; fi
[ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
if [ -n "$TORCH" ]; then
    say "installing $TORCH (the largest part)"
    # shellcheck disable=SC2086  # may be several words, such as an index and a version
    "$VENV/bin/python" -m pip install --disable-pip-version-check $TORCH
fi
say "installing kvbus with the extras $extras"
"$VENV/bin/python" -m pip install --disable-pip-version-check -e ".[$extras]"
say "compiling the index for this processor"
"$VENV/bin/python" -m kvbus_blocks.flash || say "not compiled: the indexer uses the plain index, and says so"
wanted "$kind" >"$VENV/.kvbus-$kind"
