# Sourced by the scripts beside it: `use_venv EXTRAS` leaves a Python with this project installed on the PATH.
#
# An active virtual environment is used as it is; otherwise .venv is made in the repository. PYTHON chooses the
# interpreter that makes it.

use_venv() {
    local extras=$1 python
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        if [ ! -x .venv/bin/python ]; then
            python=$(find_python)
            echo "making .venv with $($python --version)"
            "$python" -m venv .venv || {
                echo "error: '$python -m venv .venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
                return 1
            }
        fi
        VIRTUAL_ENV=$PWD/.venv
        export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
    fi
    # Only when the metadata changed: an editable install needs nothing else.
    local stamp=$VIRTUAL_ENV/.trt-kvcache-installed-${extras:-base}
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        echo "installing trt-kvcache${extras:+[$extras]} and what it needs into $VIRTUAL_ENV"
        python scripts/install.py --editable ".${extras:+[$extras]}"
        touch "$stamp"
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or later found (tried ${PYTHON:-python3, python3.14 ... python3.11}); set PYTHON to one" >&2
    return 1
}
