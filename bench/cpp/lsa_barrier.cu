// Barriers of the LSA team, one after the other: the twin of bench/kernels/src/lsa_barrier.rs.

#include <nccl_device.h>

#include "window.cuh"

// Every block: `rounds` barriers.
extern "C" __global__ void lsa_barrier(ncclDevComm comm, uint32_t rounds) {
  const ncclCoopCta cta;
  ncclLsaBarrierSession<ncclCoopCta> barrier(cta, comm, ncclTeamTagLsa(), blockIdx.x);
  for (uint32_t round = 0; round < rounds; round++) barrier.sync(cta, cuda::memory_order_acq_rel);
}

// The same barriers, with checks. A round has two barriers: between them a block's first nRanks
// threads write the round's number to every peer's `table[block][rank]`; after the second, each of
// these threads counts in `wrong[block][rank]` the rounds that have not arrived from its peer.
extern "C" __global__ void lsa_barrier_checked(ncclDevComm comm, Window table, Window wrong, uint32_t rounds) {
  const ncclTeam team = ncclTeamLsa(comm);
  const ncclCoopCta cta;
  const int peer = threadIdx.x;
  const size_t row = static_cast<size_t>(blockIdx.x) * team.nRanks;
  uint32_t mismatches = 0;
  ncclLsaBarrierSession<ncclCoopCta> barrier(cta, comm, ncclTeamTagLsa(), blockIdx.x);
  for (uint32_t round = 1; round <= rounds; round++) {
    barrier.sync(cta, cuda::memory_order_acq_rel);
    if (peer < team.nRanks) static_cast<uint32_t*>(ncclGetLsaPointer(table, 0, peer))[row + team.rank] = round;
    barrier.sync(cta, cuda::memory_order_acq_rel);
    if (peer < team.nRanks) mismatches += static_cast<const uint32_t*>(ncclGetLocalPointer(table, 0))[row + peer] != round;
  }
  if (peer < team.nRanks) static_cast<uint32_t*>(ncclGetLocalPointer(wrong, 0))[row + peer] = mismatches;
}
