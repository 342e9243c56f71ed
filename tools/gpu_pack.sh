#!/usr/bin/env bash
# Packs what a GPU machine without a network needs into one folder that git does not see:
#
#     tools/gpu_pack.sh RECIPES [FOLDER]       FOLDER is .gpu by default
#
# RECIPES is a folder of yours. Its make_pack.sh writes SGLang 0.5.17 and what it imports into a folder, as
# sgl17.tar.xz. Its env.sh sets the variables that compilers need on the GPU machine. This project is added as
# a wheel, because plugins are found by their entry points. A cache of compiled kernels that an earlier call
# saved may lie in FOLDER as cache.tar.xz; it counts too. Fails if the pack and the repository's files are
# more than 64 MiB together.
set -euo pipefail
cd "$(dirname "$0")/.."
recipes=$(realpath "$1")
out=${2:-.gpu}
most_kib=$((64 * 1024))
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
mkdir -p "$out"
echo '*' > "$out/.gitignore"
[ -f "$out/sgl17.tar.xz" ] || FLASHINFER=1 bash "$recipes/make_pack.sh" "$out"
install -m 644 "$recipes/env.sh" "$out/env.sh"
rm -rf "$out"/sgl_blend-*.whl build/lib build/bdist.*
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$out" .
tree_kib=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -ck --no-dereference | awk '$2 == "total" { sum += $1 } END { print sum }')
pack_kib=$(du -sk "$out" | cut -f1)
echo "pack $((pack_kib / 1024)) MiB, repository $((tree_kib / 1024)) MiB"
if [ $((pack_kib + tree_kib)) -gt $most_kib ]; then
  echo "together more than $((most_kib / 1024)) MiB: leave the cache away, or pack without FlashInfer" >&2
  exit 1
fi
