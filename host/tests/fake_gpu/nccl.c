// An NCCL without a network. The ranks are threads of one process (or one thread, in groups) and meet in memory: collectives,
// puts and signals move real data when all the ranks' streams have come to them. A call is logged as it is made, one that is
// refused by a switch too.
//
// In a process that a launcher started (WORLD_SIZE is set) no other rank is there: each is taken to do and hold the same.
//
// FAKE_FAIL=function[:rank],...      these calls fail with code 2
// FAKE_HANG_IN=function[:rank],...   these calls do not return before another thread aborts a communicator of that rank
// FAKE_ASYNC_ERROR=code[:rank]       what ncclCommGetAsyncError reports
// FAKE_ASYNC_ERROR_SPINNING=code     the same, while a kernel waits (FAKE_SPIN)
// FAKE_VERSION=code                  what ncclGetVersion says; 23203 unless set
// FAKE_NO_WINDOW                     windows are NULL, as without symmetric memory
// FAKE_TWO_TEAMS, FAKE_LSA_SIZE=n    ranks that reach each other: half of them; n. All unless set
// FAKE_MULTIMEM                      multicast is there
// FAKE_NO_DEVICE_API, FAKE_NO_HOST_RMA
// FAKE_GIN_TYPE=n, FAKE_RAILED_GIN_TYPE=n, FAKE_GIN_CONNECTION=n, FAKE_GIN_STRIDE=n, FAKE_GIN_SUPPORT=bits, FAKE_CFT
// FAKE_GIN_CONNECTIONS=n,m,...        the back end of each connection of a device communicator with GIN; FAKE_GIN_TYPE's one unless set
//
// Where a call has no communicator, its rank is the GPU of its thread. "AFTER ITS END" in the log is a call on a communicator
// or a window that has ended, "MISMATCH" ranks that called different things together. A communicator with `blocking` 0 gives
// code 7 and does its work in the background; then three polls say 7, the next 0.
#include "nccl_comm.h"
#include "nccl_ops.h"
#include "nccl_windows.h"
#include "nccl_device.h"
