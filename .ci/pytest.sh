#!/bin/sh
# Run pytest over one folder. Usage: pytest.sh PYTHON FOLDER
# A folder without any test file is skipped with a note; a folder with test files whose tests are
# not collected is a failure (pytest exits with 5).
set -eu

python=$1
folder=$2

if [ ! -d "$folder" ] || [ -z "$(find "$folder" -name 'test_*.py' -print -quit)" ]; then
    echo "pytest: $folder has no test files yet, skipped"
    exit 0
fi
exec "$python" -m pytest "$folder"
