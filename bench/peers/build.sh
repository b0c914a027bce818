#!/bin/sh
# Compiles the programs of bench/peers, by NVCC and with the headers of FlashInfer's wheel
# (flashinfer-python from PyPI, unpacked; its folder flashinfer/data), for Hopper:
#
#     NVCC=nvcc bench/peers/build.sh FLASHINFER_DATA OUTPUT_FOLDER
#
# A program contains CUDA's runtime, and needs the driver and the GPUs alone.
set -e
data=$1 output=$2
mkdir -p "$output"
"${NVCC:-nvcc}" -O2 -std=c++20 -cudart static \
    -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr \
    -Xcompiler -static-libstdc++,-static-libgcc -DFLASHINFER_ENABLE_F16 -DFLASHINFER_ENABLE_BF16 $NVCC_FLAGS \
    -I "$data/include" -I "$data/spdlog/include" -o "$output/flashinfer" \
    "$(dirname "$0")/flashinfer.cu" -lcuda
echo "$output/flashinfer"
