#!/usr/bin/env bash
# Mooncake for tests and trials: the store's client and its master (mooncake_master) in .venv, and the
# libraries that its build without CUDA loads. A second call installs nothing. Servers with GPUs take
# the package mooncake-transfer-engine of the same version.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.3.13.post1
python=${PYTHON:-.venv/bin/python}
libraries=(libibverbs1 libnl-3-200 libnl-route-3-200)

missing=()
for library in "${libraries[@]}"; do
  dpkg-query -W -f '${Status}' "$library" 2>/dev/null | grep -q "ok installed" || missing+=("$library")
done
if ((${#missing[@]})); then
  as_root=()
  ((EUID)) && as_root=(sudo)
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

# Its Python dependencies but msgpack, which only its command line needs, are in requirements/cpu.lock.
if ! "$python" -m pip show --quiet mooncake-transfer-engine-non-cuda 2>/dev/null; then
  "$python" -m pip install --quiet --no-deps "mooncake-transfer-engine-non-cuda==$version"
fi
"$python" -c "import mooncake.store"
echo "Mooncake $version is installed"
