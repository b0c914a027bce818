// All-reduce (sum) by load and store within the LSA team: the twin of kernels/src/lsa_allreduce.rs.
// Every rank sums its share of all ranks' inputs, and stores the sum to all ranks. f16 and bf16 are
// summed in f32 and rounded once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl_device.h>

#include "window.cuh"

namespace {

// Converts 16 bytes of T to f32, and back.
template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int count = 4;

  static __device__ void widen(uint4 vector, float (&wide)[count]) {
    wide[0] = __uint_as_float(vector.x);
    wide[1] = __uint_as_float(vector.y);
    wide[2] = __uint_as_float(vector.z);
    wide[3] = __uint_as_float(vector.w);
  }

  static __device__ uint4 narrow(const float (&wide)[count]) {
    return {__float_as_uint(wide[0]), __float_as_uint(wide[1]), __float_as_uint(wide[2]), __float_as_uint(wide[3])};
  }
};

// Two elements per word.
template <typename Pair, float2 (*to_float)(Pair), Pair (*from_float)(float2)>
struct HalfLanes {
  static constexpr int count = 8;

  static __device__ void widen(uint4 vector, float (&wide)[count]) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      Pair pair;
      memcpy(&pair, &words[i], sizeof pair);
      const float2 both = to_float(pair);
      wide[2 * i] = both.x;
      wide[2 * i + 1] = both.y;
    }
  }

  static __device__ uint4 narrow(const float (&wide)[count]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Pair pair = from_float({wide[2 * i], wide[2 * i + 1]});
      memcpy(&words[i], &pair, sizeof pair);
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

template <>
struct Lanes<__half> : HalfLanes<__half2, __half22float2, __float22half2_rn> {};

template <>
struct Lanes<__nv_bfloat16> : HalfLanes<__nv_bfloat162, __bfloat1622float2, __float22bfloat162_rn> {};

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T from_float(float x);
template <>
__device__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ size_t thread_of_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ size_t threads_of_grid() { return gridDim.x * blockDim.x; }

// The sum of one vector from each rank.
template <typename T, int N>
__device__ uint4 sum_of(const uint4 (&parts)[N]) {
  float sum[Lanes<T>::count];
  Lanes<T>::widen(parts[0], sum);
#pragma unroll
  for (int i = 1; i < N; i++) {
    float part[Lanes<T>::count];
    Lanes<T>::widen(parts[i], part);
#pragma unroll
    for (int lane = 0; lane < Lanes<T>::count; lane++) sum[lane] += part[lane];
  }
  return Lanes<T>::narrow(sum);
}

// One rank's share: the 16-byte vectors [begin, end), and for the last rank also the elements
// [tail, count), which fill no vector.
template <typename T>
struct Share {
  size_t begin, end, tail;

  __device__ Share(ncclTeam team, size_t count) {
    const size_t vectors = count / Lanes<T>::count;
    const size_t each = (vectors + team.nRanks - 1) / team.nRanks;
    begin = min(each * team.rank, vectors);
    end = min(begin + each, vectors);
    tail = team.rank + 1 == team.nRanks ? vectors * Lanes<T>::count : count;
  }
};

// Sums the elements after the last 16-byte vector, one per thread at a time.
template <typename T>
__device__ void reduce_tail(ncclTeam team, ncclWindow_t send, ncclWindow_t recv, size_t tail, size_t count) {
  for (size_t at = tail + thread_of_grid(); at < count; at += threads_of_grid()) {
    float sum = to_float(static_cast<const T*>(ncclGetLsaPointer(send, 0, 0))[at]);
    for (int peer = 1; peer < team.nRanks; peer++) {
      sum += to_float(static_cast<const T*>(ncclGetLsaPointer(send, 0, peer))[at]);
    }
    for (int peer = 0; peer < team.nRanks; peer++) {
      static_cast<T*>(ncclGetLsaPointer(recv, 0, peer))[at] = from_float<T>(sum);
    }
  }
}

// A share for a team of N ranks, with Unroll vectors of each rank in flight per thread.
template <typename T, int N, int Unroll>
__device__ void reduce_share(ncclTeam team, ncclWindow_t send, ncclWindow_t recv, size_t count) {
  // Own rank first, then upwards, so that ranks read from different peers at any time.
  const uint4* from[N];
  uint4* to[N];
  from[0] = static_cast<const uint4*>(ncclGetLocalPointer(send, 0));
  to[0] = static_cast<uint4*>(ncclGetLocalPointer(recv, 0));
#pragma unroll
  for (int i = 1; i < N; i++) {
    const int peer = (team.rank + i) % N;
    from[i] = static_cast<const uint4*>(ncclGetLsaPointer(send, 0, peer));
    to[i] = static_cast<uint4*>(ncclGetLsaPointer(recv, 0, peer));
  }
  const Share<T> share(team, count);
  const size_t stride = threads_of_grid();
  size_t at = share.begin + thread_of_grid();
  uint4 loaded[Unroll][N];
  for (; at + (Unroll - 1) * stride < share.end; at += Unroll * stride) {
#pragma unroll
    for (int u = 0; u < Unroll; u++) {
#pragma unroll
      for (int i = 0; i < N; i++) loaded[u][i] = from[i][at + u * stride];
    }
#pragma unroll
    for (int u = 0; u < Unroll; u++) {
      const uint4 sum = sum_of<T>(loaded[u]);
#pragma unroll
      for (int i = 0; i < N; i++) to[i][at + u * stride] = sum;
    }
  }
  // Each thread's last vectors, fewer than Unroll, all loads in flight at once.
#pragma unroll
  for (int u = 0; u < Unroll; u++) {
    if (at + u * stride < share.end) {
#pragma unroll
      for (int i = 0; i < N; i++) loaded[u][i] = from[i][at + u * stride];
    }
  }
#pragma unroll
  for (int u = 0; u < Unroll; u++) {
    if (at + u * stride < share.end) {
      const uint4 sum = sum_of<T>(loaded[u]);
#pragma unroll
      for (int i = 0; i < N; i++) to[i][at + u * stride] = sum;
    }
  }
  reduce_tail<T>(team, send, recv, share.tail, count);
}

// A share for any number of ranks.
template <typename T>
__device__ void reduce_share_of_many(ncclTeam team, ncclWindow_t send, ncclWindow_t recv, size_t count) {
  const auto peer = [team](int i) {
    const int peer = team.rank + i;
    return peer < team.nRanks ? peer : peer - team.nRanks;
  };
  const Share<T> share(team, count);
  for (size_t at = share.begin + thread_of_grid(); at < share.end; at += threads_of_grid()) {
    float sum[Lanes<T>::count];
    Lanes<T>::widen(static_cast<const uint4*>(ncclGetLocalPointer(send, 0))[at], sum);
    for (int i = 1; i < team.nRanks; i++) {
      float part[Lanes<T>::count];
      Lanes<T>::widen(static_cast<const uint4*>(ncclGetLsaPointer(send, 0, peer(i)))[at], part);
#pragma unroll
      for (int lane = 0; lane < Lanes<T>::count; lane++) sum[lane] += part[lane];
    }
    const uint4 vector = Lanes<T>::narrow(sum);
    for (int i = 0; i < team.nRanks; i++) static_cast<uint4*>(ncclGetLsaPointer(recv, 0, peer(i)))[at] = vector;
  }
  reduce_tail<T>(team, send, recv, share.tail, count);
}

template <typename T>
__device__ void all_reduce(const ncclDevComm& comm, ncclWindow_t send, ncclWindow_t recv, size_t count) {
  const ncclTeam team = ncclTeamLsa(comm);
  const ncclCoopCta cta;
  ncclLsaBarrierSession<ncclCoopCta> barrier(cta, comm, ncclTeamTagLsa(), blockIdx.x);
  barrier.sync(cta, cuda::memory_order_acquire);
  switch (team.nRanks) {
    case 1: reduce_share<T, 1, 4>(team, send, recv, count); break;
    case 2: reduce_share<T, 2, 8>(team, send, recv, count); break;
    case 4: reduce_share<T, 4, 4>(team, send, recv, count); break;
    case 8: reduce_share<T, 8, 1>(team, send, recv, count); break;
    default: reduce_share_of_many<T>(team, send, recv, count);
  }
  barrier.sync(cta, cuda::memory_order_release);
}

}  // namespace

extern "C" __global__ void lsa_allreduce_f32(ncclDevComm comm, Window send, Window recv, size_t count) {
  all_reduce<float>(comm, send, recv, count);
}

extern "C" __global__ void lsa_allreduce_f16(ncclDevComm comm, Window send, Window recv, size_t count) {
  all_reduce<__half>(comm, send, recv, count);
}

extern "C" __global__ void lsa_allreduce_bf16(ncclDevComm comm, Window send, Window recv, size_t count) {
  all_reduce<__nv_bfloat16>(comm, send, recv, count);
}
