// A CUDA C++ program that uses NCCL but not devcomm: kernels on all GPUs of this host, one rank per
// thread, put to each other over GIN, with signals. It checks that GIN, also by devcomm's plugin,
// works for any program that uses NCCL.
//
//   cargo xtask cpp      (or: nvcc -std=c++17 -arch=sm_90 -I NCCL/include gin_put.cu -lnccl)
//   gin_put [rounds]
//
// Every byte is checked; the last line is PASS, FAIL, or SKIP with the reason if there is no GIN.

// Only PROXY: NCCL 2.32.3's `ncclGin_BackendOne` does not compile with more than one back end
// enabled.
#define NCCL_GIN_PROXY_ENABLE 1
#define NCCL_GIN_GDAKI_ENABLE 0
#define NCCL_GIN_GPI_ENABLE 0
#define NCCL_GIN_EFA_GDA_ENABLE 0
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define CUDA(call)                                                                          \
  do {                                                                                      \
    cudaError_t result = (call);                                                            \
    if (result != cudaSuccess) fail(#call, cudaGetErrorString(result));                     \
  } while (0)
#define NCCL(call)                                                                          \
  do {                                                                                      \
    ncclResult_t result = (call);                                                           \
    if (result != ncclSuccess) fail(#call, ncclGetLastError(nullptr));                      \
  } while (0)

namespace {

// GIN contexts, with one block, signal and barrier each.
constexpr int contexts = 4;
// The bytes of the longest message: see `size_of`.
constexpr size_t largest = 1 << 20;

[[noreturn]] void fail(const char *call, const char *why) {
  std::printf("FAIL: %s: %s\n", call, why);
  std::fflush(stdout);
  std::_Exit(1);
}

// Puts `bytes` bytes from `send + peer * bytes` to `recv + rank * bytes` of every peer, each put
// with a signal. Ends when the puts of all peers have arrived, and `send` may be written again.
// There is one block per context; each moves a share of every message.
__global__ void exchange(ncclDevComm comm, ncclWindow_t send, ncclWindow_t recv, size_t bytes) {
  const ncclGinSignal_t signal = blockIdx.x;
  const ncclTeam world = ncclTeamWorld(comm);
  const ncclGin gin(comm, blockIdx.x % comm.ginContextCount);
  ncclCoopCta block;
  const size_t first = bytes * blockIdx.x / gridDim.x, last = bytes * (blockIdx.x + 1) / gridDim.x;
  // This block returns on all ranks, so none waits for it at the barrier.
  if (first == last) return;

  ncclGinBarrierSession<ncclCoopCta> barrier(block, gin, ncclTeamTagWorld(), blockIdx.x);
  barrier.sync(block, cuda::memory_order_acquire, ncclGinFenceLevel::None);

  if (threadIdx.x == 0) gin.increaseSignalShadow(signal, world.nRanks - 1);
  for (int i = 1 + threadIdx.x; i < world.nRanks; i += blockDim.x) {
    const int peer = (world.rank + i) % world.nRanks;
    gin.put(world, peer, recv, world.rank * bytes + first, send, peer * bytes + first, last - first,
            ncclGin_WeakSignalInc{signal});
  }
  block.sync();
  gin.waitSignalMeetShadow(block, signal);
  gin.flush(block);
}

// Byte `i` of what rank `from` sends to rank `to`.
uint8_t byte(unsigned round, int from, int to, size_t i) {
  uint64_t z = (uint64_t(round) << 48) ^ (uint64_t(from) << 40) ^ (uint64_t(to) << 32) ^ i;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return uint8_t(z >> 32);
}

// The bytes per message in a round: about a third, two thirds or all of a power of two to 1 MiB.
size_t size_of(unsigned round) {
  const size_t limit = size_t(1) << (round % 21);
  return 1 + (limit - 1) * (1 + round / 21 % 3) / 3;
}

// Bytes received wrong on all ranks, or SIZE_MAX if there is no GIN.
std::atomic<size_t> wrong{0};

void run(int rank, int ranks, ncclUniqueId id, unsigned rounds) {
  CUDA(cudaSetDevice(rank));
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, ranks, id, rank));

  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  NCCL(ncclCommQueryProperties(comm, &properties));
  if (!properties.ginSupport[NCCL_GIN_TYPE_PROXY] || properties.ginConnectionType != NCCL_GIN_CONNECTION_FULL) {
    // Every rank takes this branch.
    if (rank == 0) std::printf("SKIP: NCCL offers no GIN of type PROXY that connects all ranks\n");
    NCCL(ncclCommDestroy(comm));
    wrong = SIZE_MAX;
    return;
  }

  void *buffers[2];
  ncclWindow_t windows[2];
  for (int i = 0; i < 2; i++) {
    NCCL(ncclMemAlloc(&buffers[i], ranks * largest));
    NCCL(ncclCommWindowRegister(comm, buffers[i], ranks * largest, &windows[i], NCCL_WIN_COLL_SYMMETRIC));
  }
  ncclDevCommRequirements_t requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  requirements.ginType = NCCL_GIN_TYPE_PROXY;
  requirements.ginContextCount = contexts;
  requirements.ginSignalCount = contexts;
  requirements.worldGinBarrierCount = contexts;
  requirements.ginVaSignalsRequired = false;
  ncclDevComm device;
  NCCL(ncclDevCommCreate(comm, &requirements, &device));
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));

  std::vector<uint8_t> data(ranks * largest);
  for (unsigned round = 0; round < rounds; round++) {
    const size_t bytes = size_of(round);
    for (int to = 0; to < ranks; to++)
      for (size_t i = 0; i < bytes; i++) data[to * bytes + i] = byte(round, rank, to, i);
    CUDA(cudaMemcpy(buffers[0], data.data(), ranks * bytes, cudaMemcpyHostToDevice));
    CUDA(cudaMemset(buffers[1], 0, ranks * bytes));
    CUDA(cudaDeviceSynchronize());
    exchange<<<contexts, 64, 0, stream>>>(device, windows[0], windows[1], bytes);
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(data.data(), buffers[1], ranks * bytes, cudaMemcpyDeviceToHost));
    for (int from = 0; from < ranks; from++)
      for (size_t i = 0; i < bytes; i++) wrong += from != rank && data[from * bytes + i] != byte(round, from, rank, i);
  }

  CUDA(cudaStreamDestroy(stream));
  NCCL(ncclDevCommDestroy(comm, &device));
  for (int i = 0; i < 2; i++) NCCL(ncclCommWindowDeregister(comm, windows[i]));
  for (void *buffer : buffers) NCCL(ncclMemFree(buffer));
  NCCL(ncclCommDestroy(comm));
}

} // namespace

int main(int argc, char **argv) {
  const unsigned rounds = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 100;
  int ranks = 0;
  if (cudaGetDeviceCount(&ranks) != cudaSuccess || ranks < 2) {
    std::printf("SKIP: at least two GPUs are needed, but there are %d\n", ranks);
    return 0;
  }
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; rank++) threads.emplace_back(run, rank, ranks, id, rounds);
  for (std::thread &thread : threads) thread.join();
  if (wrong == SIZE_MAX) return 0;
  std::printf("%d ranks, %u rounds: %zu bytes wrong\n%s\n", ranks, rounds, wrong.load(), wrong ? "FAIL" : "PASS");
  return wrong ? 1 : 0;
}
