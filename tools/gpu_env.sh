# Source on the GPU machine, in the repository's root, with the folder of tools/gpu_pack.sh as argument:
#
#     . tools/gpu_env.sh .gpu && python3 tools/gpu_run.py 1 --out "$OUT"
pack=${1:-.gpu}
unpack() { tar xJf "$1" -C "$2" 2>/dev/null || python3 -m tarfile -e "$1" "$2"; }  # without xz, too
[ -d /opt/sgl17/site ] || { mkdir -p /opt/sgl17 && unpack "$pack/sgl17.tar.xz" /opt/sgl17; }
[ ! -f "$pack/cache.tar.xz" ] || [ -d /opt/jit ] || unpack "$pack/cache.tar.xz" /
. "$pack/env.sh"
# env.sh asks ldconfig for the driver's library, which need not know it.
for driver in /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu /usr/lib64; do
  [ -e /opt/stub/libcuda.so ] || [ ! -e $driver/libcuda.so.1 ] || ln -sf $driver/libcuda.so.1 /opt/stub/libcuda.so
done
rm -rf /opt/sgl-blend && mkdir -p /opt/sgl-blend
python3 -m zipfile -e "$pack"/sgl_blend-*.whl /opt/sgl-blend
# Never the repository's root: `import kernels` there would find ours instead of Hugging Face's.
export PYTHONPATH=/opt/sgl17/site:/opt/sgl-blend
