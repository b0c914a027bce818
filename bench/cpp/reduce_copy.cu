// All-reduce (sum) by NCCL's own reduce-copy: the twin of bench/kernels/src/reduce_copy.rs.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl_device.h>

#include "window.cuh"

namespace {

// Every block of every rank sums one contiguous part, a multiple of 16 bytes except the last part.
template <typename T>
__device__ void all_reduce(const ncclDevComm& comm, ncclWindow_t send, ncclWindow_t recv, size_t count) {
  constexpr size_t lanes = 16 / sizeof(T);
  const ncclTeam team = ncclTeamLsa(comm);
  const ncclCoopCta cta;
  ncclLsaBarrierSession<ncclCoopCta> barrier(cta, comm, ncclTeamTagLsa(), blockIdx.x);
  barrier.sync(cta, cuda::memory_order_acquire);
  const size_t parts = static_cast<size_t>(team.nRanks) * gridDim.x;
  const size_t vectors = (count + lanes - 1) / lanes;
  const size_t each = (vectors + parts - 1) / parts * lanes;
  const size_t begin = min((static_cast<size_t>(team.rank) * gridDim.x + blockIdx.x) * each, count);
  const size_t length = min(each, count - begin);
  if (length > 0) {
    ncclLsaReduceSumCopy<T>(cta, send, begin * sizeof(T), recv, begin * sizeof(T), length, team);
  }
  barrier.sync(cta, cuda::memory_order_release);
}

}  // namespace

extern "C" __global__ void reduce_copy_f32(ncclDevComm comm, Window send, Window recv, size_t count) {
  all_reduce<float>(comm, send, recv, count);
}

extern "C" __global__ void reduce_copy_f16(ncclDevComm comm, Window send, Window recv, size_t count) {
  all_reduce<__half>(comm, send, recv, count);
}

extern "C" __global__ void reduce_copy_bf16(ncclDevComm comm, Window send, Window recv, size_t count) {
  all_reduce<__nv_bfloat16>(comm, send, recv, count);
}
