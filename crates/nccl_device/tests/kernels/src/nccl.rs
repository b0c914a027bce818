//! NCCL's own reduce-copy functions.

use cuda_std::prelude::*;
use devcomm_types::F8E4M3;
use nccl_device::reduce_copy::nccl::{self, NcclElement, NcclMultimemElement};
use nccl_device::{Coop, DevComm, Window};

/// Calls every load/store function.
#[kernel(T = [f32, F8E4M3])]
pub unsafe fn nccl_lsa<T: NcclElement>(
    comm: DevComm,
    src: Window<T>,
    dst: Window<T>,
    local: *mut T,
    count: usize,
) {
    let (coop, team) = (Coop::cta(), comm.lsa_team());
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe {
        nccl::lsa_reduce_sum(coop, src, 0, local, count, team);
        nccl::lsa_copy(coop, local, dst, 0, count, team);
        nccl::lsa_reduce_sum_copy(coop, src, 0, dst, 0, count, team);
        nccl::local_reduce_sum_copy(coop, 1, local, 0, 1, local, 0, count);
    }
}

/// Calls every multicast function.
#[kernel(T = [f16])]
pub unsafe fn nccl_multimem<T: NcclMultimemElement>(
    comm: DevComm,
    src: Window<T>,
    dst: Window<T>,
    local: *mut T,
    count: usize,
) {
    let coop = Coop::cta();
    let (src, dst) = (src.multimem(&comm), dst.multimem(&comm));
    // SAFETY: the test passes windows and buffers with these elements, which no other kernel uses.
    unsafe {
        nccl::multimem_reduce_sum(coop, src, local, count);
        nccl::multimem_copy(coop, local, dst, count);
        nccl::multimem_reduce_sum_copy(coop, src, dst, count);
    }
}
