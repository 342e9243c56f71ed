#!/usr/bin/env bash
# Packs what a GPU machine without a network needs into one folder that git does not see:
#
#     tools/gpu_pack.sh RECIPES [FOLDER]       FOLDER is .gpu by default
#
# RECIPES holds make_pack.sh, which packs SGLang 0.5.17 and its dependencies, and env.sh, which unpacks them
# there. To it comes this project as a wheel, because plugins are found by their entry points.
set -euo pipefail
cd "$(dirname "$0")/.."
recipes=$(realpath "$1")
out=${2:-.gpu}
python=.venv/bin/python
[ -x $python ] || python=python3
exclude=$(git rev-parse --git-path info/exclude)
grep -qx "/$out/" "$exclude" || echo "/$out/" >> "$exclude"
mkdir -p "$out"
[ -f "$out/sgl17.tar.xz" ] || FLASHINFER=1 bash "$recipes/make_pack.sh" "$out"
cp "$recipes/env.sh" "$out/env.sh"
rm -f "$out"/sgl_blend-*.whl
$python -m pip wheel --quiet --no-deps --wheel-dir "$out" .
du -sh "$out"
