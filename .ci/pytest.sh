#!/bin/sh
# Run pytest over folders. Usage: pytest.sh PYTHON FOLDER...
# Two processes take whole files in the order of the folders, so the longest file should come first.
# pytest fails where it collects no test (exit status 5).
set -eu

python=$1
shift
exec "$python" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
    --durations 15 "$@"
