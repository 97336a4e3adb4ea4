#!/bin/sh
# Installs what compiles the kernels, and compiles them:
#   sh setup.sh [ARCHITECTURE]     such as sm_90, which is the default
# It needs python3 with pip, cargo, a C++ compiler, and CUDA's headers: those of CUDA_HOME, or those that
# `cargo xtask setup` has installed.
set -eu
cd "$(dirname "$0")"

# A folder of their own: this compiler is newer than the CUDA that libtorch uses.
if [ ! -e tools/.complete ]; then
    python3 -m pip install --quiet --upgrade --target tools \
        nvidia-cuda-tileiras==13.5.37 nvidia-cuda-nvcc==13.5.37 nvidia-nvvm==13.5.37 libclang==18.1.1
    touch tools/.complete
fi

# The wheel of libclang has none of clang's own headers, of which the compiler's do as well.
LIBCLANG_PATH=$PWD/tools/clang/native
BINDGEN_EXTRA_CLANG_ARGS="-isystem $(${CC:-cc} -print-file-name=include)"
CUDA_TOOLKIT_PATH=${CUDA_HOME:-$PWD/../../.venv/cuda}
# The compiler takes libraries and programs from CUDA_HOME, and fails with those of an older CUDA.
CUDA_HOME=$PWD/tools/nvidia/cu13
CUTILE_TILEIRAS_PATH=$CUDA_HOME/bin/tileiras
export LIBCLANG_PATH BINDGEN_EXTRA_CLANG_ARGS CUDA_HOME CUDA_TOOLKIT_PATH CUTILE_TILEIRAS_PATH
cargo run --locked -p kernels -- "${1:-sm_90}"

# What the benchmark compares with.
nvcc=$CUDA_TOOLKIT_PATH/bin/nvcc
if [ -x "$nvcc" ]; then
    "$nvcc" -cubin "-arch=${1:-sm_90}" -O3 benches/silu.cu -o "images/nvcc_silu_${1:-sm_90}.cubin"
fi
