# Source on the GPU machine, in the repository's root, with the folder of tools/gpu_pack.sh as argument:
#
#     . tools/gpu_env.sh .gpu && python3 tools/gpu_run.py 1 --out "$OUT"
. "${1:-.gpu}/env.sh"
rm -rf /opt/sgl-blend && mkdir -p /opt/sgl-blend
python3 -m zipfile -e "${1:-.gpu}"/sgl_blend-*.whl /opt/sgl-blend
# Never the repository's root: `import kernels` there would find ours instead of Hugging Face's.
export PYTHONPATH=/opt/sgl17/site:/opt/sgl-blend
