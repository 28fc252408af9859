# Sourced by the scripts: makes .venv beside setup.py with what is asked for, once, and uses it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

use_environment() { # use_environment EXTRAS
    local stamp=".venv/installed-$1-$(cksum setup.py | cut -d' ' -f1)"
    if [ ! -e "$stamp" ]; then
        [ -x .venv/bin/python ] || python3 -m venv .venv
        echo "Installing into .venv ..." >&2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$1]"
        touch "$stamp"
    fi
    export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
}
