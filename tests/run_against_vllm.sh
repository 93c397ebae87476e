#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# run_against_vllm.sh VERSION [PYTEST ARGUMENTS]: runs the layer-level tests with vLLM VERSION's Python code.
#
# The wheel for CUDA is downloaded without its dependencies and only its Python files are unpacked, to
# .cache/vllm-VERSION, which comes before the environment's own vLLM on the path. PYTHON (default: python3) needs torch,
# pytest and what vLLM imports, as the CPU environment has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?usage: run_against_vllm.sh VERSION [PYTEST ARGUMENTS]}
shift
python=${PYTHON:-python3}
site=.cache/vllm-$version

if [ ! -f "$site/.complete" ]; then
  mkdir -p .cache
  download=$(mktemp -d .cache/download-XXXXXX)
  trap 'rm -rf "$download"' EXIT
  "$python" -m pip download "vllm==$version" --quiet --no-deps --only-binary :all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux1_x86_64 --dest "$download"
  rm -rf "$site"
  "$python" - "$download" "$site" <<'UNPACK'
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
skipped = (".so", ".cubin", ".cu", ".cuh")  # the layer-level tests run no compiled code of vLLM's
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(sys.argv[2], [name for name in archive.namelist() if not name.endswith(skipped)])
UNPACK
  touch "$site/.complete"
fi

export PYTHONPATH="$PWD/$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
found=$("$python" -c 'import vllm; print(vllm.__version__, vllm.__file__)' 2>/dev/null)
case $found in
  "$version "*"$site"*) echo "layer-level tests with vLLM $found" ;;
  *) echo "expected vLLM $version from $site, found $found" >&2; exit 1 ;;
esac
"$python" -m pytest -q tests/test_plugin.py tests/test_config.py tests/test_loading.py \
  tests/test_loading_deferred.py tests/test_loading_models.py tests/test_method.py tests/test_linear.py \
  tests/test_eplb.py tests/test_modular.py "$@"
