#!/bin/sh
# Run pytest over a folder. Usage: pytest.sh PYTHON FOLDER
# Two processes take whole files, each on a core of its own (tests/integration/conftest.py).
# pytest fails where it collects no test (exit status 5).
set -eu

exec "$1" -m pytest --numprocesses 2 --dist loadfile --durations 15 "$2"
