// Ping-pong over the network between two neighbouring ranks, each message a put with a signal, by
// the PROXY back end: the twin of bench/kernels/src/gin_put.rs.

// Only PROXY: NCCL 2.32.3's `ncclGin_BackendOne` does not compile with more than one back end
// enabled.
#define NCCL_GIN_PROXY_ENABLE 1
#define NCCL_GIN_GDAKI_ENABLE 0
#define NCCL_GIN_GPI_ENABLE 0
#define NCCL_GIN_EFA_GDA_ENABLE 0
#include <nccl_device.h>

#include "window.cuh"

static_assert(NCCL_GIN_BACKEND_MASK_ALL == 1u << NCCL_NET_DEVICE_GIN_PROXY, "one back end");

// `rounds` round trips: the first `bytes` of the even rank's `send` to the odd rank's `recv`, then
// the other way round. One block of one warp. Uses signal 0, whose shadow counts the received
// messages, across launches too.
extern "C" __global__ void gin_put(ncclDevComm comm, Window send, Window recv, size_t bytes, uint32_t rounds) {
  const ncclGinSignal_t signal = 0;
  const ncclTeam team = ncclTeamWorld(comm);
  ncclCoopWarp warp;
  const int peer = team.rank ^ 1;
  if (peer >= team.nRanks) return;
  const ncclGin gin(comm, /*contextIndex=*/0);
  const bool first = team.rank % 2 == 0;
  for (uint32_t round = 0; round < 2 * rounds; round++) {
    if (first == (round % 2 == 0)) {
      gin.put(team, peer, recv.handle, 0, send.handle, 0, bytes, ncclGin_WeakSignalInc{signal}, ncclGin_None{}, warp);
    } else {
      if (warp.thread_rank() == 0) gin.increaseSignalShadow(signal, 1);
      warp.sync();
      gin.waitSignalMeetShadow(warp, signal);
    }
  }
  gin.flush(warp);
}
