#!/bin/sh
# Measures a rented GPU: installs what is missing, then runs benchmarks/gpu.py, whose options it takes. In a clone:
#
#   sh benchmarks/gpu.sh --plan                      what would be measured; installs nothing
#   sh benchmarks/gpu.sh                             within 25 minutes; the same again goes on where it was stopped
#   EXTRAS=dev,vllm sh benchmarks/gpu.sh             with vLLM
#   WHEELS=/mnt/wheels sh benchmarks/gpu.sh          without a network: wheels of ebft (make dist) and of what is missing
#   PYTHON=/opt/env/bin/python sh benchmarks/gpu.sh  an environment that has everything
#
# The torch of the machine's image is used if its version fits, since another one is a download of gigabytes.
set -eu
cd "$(dirname "$0")/.."

case " $* " in *" --plan "*) # installs nothing
    if [ -z "${PYTHON:-}" ]; then
        PYTHON=python3
        if [ -x .venv-gpu/bin/python ]; then PYTHON=.venv-gpu/bin/python; fi
    fi
    exec "$PYTHON" -m benchmarks.gpu "$@" ;;
esac

if [ -n "${WHEELS:-}" ]; then
    PYTHON=${PYTHON:-python3}
    SITE=$(mktemp -d)
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl
    export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
elif [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv-gpu/bin/python
    if python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        PYTHON=python3 # an environment, whose packages another one would not see
    elif [ ! -x "$PYTHON" ] && ! python3 -m venv --system-site-packages .venv-gpu; then
        python3 -m pip install --quiet virtualenv # where Python comes without pip for environments
        python3 -m virtualenv --quiet --system-site-packages .venv-gpu
    fi
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -e ".[${EXTRAS:-dev}]"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check liger-kernel || echo "Measuring without Liger."
fi
exec "$PYTHON" -m benchmarks.gpu "$@"
