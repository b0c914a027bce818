// All-to-all of 8-byte elements within the LSA team by NCCL's low-latency protocol: each element
// travels with a flag, so that there is no barrier. The twin of bench/kernels/src/ll_exchange.rs.

#include <nccl_device.h>

#include "window.cuh"

namespace {

// Slot, within an epoch, of this thread's element from `rank`.
__device__ int slot(int rank) { return rank * blockDim.x + threadIdx.x; }

// Sends this thread's elements to the N ranks of the team, and receives theirs. All loads are in
// flight at once, and so are all polls.
template <int N>
__device__ void exchange(ncclLLA2ASession<ncclCoopCta>& session, ncclTeam team, const uint64_t* from, uint64_t* to,
                         size_t at, size_t count) {
  uint64_t elements[N];
  // Own rank first, then upwards, so that ranks send to different peers at any time.
#pragma unroll
  for (int i = 0; i < N; i++) elements[i] = from[(team.rank + i) % N * count + at];
#pragma unroll
  for (int i = 0; i < N; i++) session.send((team.rank + i) % N, slot(team.rank), elements[i]);
  session.recvUnrolled<N, N>(slot(0), N, blockDim.x, elements);
#pragma unroll
  for (int i = 0; i < N; i++) to[i * count + at] = elements[i];
}

// The same for any number of ranks.
__device__ void exchange_with_many(ncclLLA2ASession<ncclCoopCta>& session, ncclTeam team, const uint64_t* from,
                                   uint64_t* to, size_t at, size_t count) {
  for (int i = 0; i < team.nRanks; i++) {
    const int right = team.rank + i;
    const int peer = right < team.nRanks ? right : right - team.nRanks;
    session.send(peer, slot(team.rank), from[peer * count + at]);
  }
  for (int rank = 0; rank < team.nRanks; rank++) to[rank * count + at] = session.recv<uint64_t>(slot(rank));
}

}  // namespace

// `recv[rank * count + i]` of a peer becomes this rank's `send[peer * count + i]`, for `i < count`.
// Every block has its own session, with space for one element per rank and thread.
extern "C" __global__ void ll_exchange(ncclDevComm comm, ncclLLA2AHandle handle, Window send, Window recv,
                                       size_t count) {
  const ncclTeam team = ncclTeamLsa(comm);
  const ncclCoopCta cta;
  const int room = team.nRanks * blockDim.x;
  ncclLLA2ASession<ncclCoopCta> session(cta, comm, team, handle, blockIdx.x, room);
  const auto* from = static_cast<const uint64_t*>(ncclGetLocalPointer(send, 0));
  auto* to = static_cast<uint64_t*>(ncclGetLocalPointer(recv, 0));
  // An epoch moves one element per thread from each rank to each rank.
  for (size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x; first < count;
       first += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const size_t at = first + threadIdx.x;
    if (at < count) {
      switch (team.nRanks) {
        case 2: exchange<2>(session, team, from, to, at, count); break;
        case 4: exchange<4>(session, team, from, to, at, count); break;
        case 8: exchange<8>(session, team, from, to, at, count); break;
        default: exchange_with_many(session, team, from, to, at, count);
      }
    }
    session.endEpoch(cta);
  }
}
