//! Incorrect kernels, which the simulator must detect.

use cuda_std::prelude::*;
use nccl_device::gin::GinBackend;
use nccl_device::raw;
use nccl_device::reduce_copy::nccl;
use nccl_device::{BarrierIndex, Coop, DevComm, LlA2a, LlA2aBuffer, MemoryOrder};

use crate::extra::{Extra, Words};

const ORDER: MemoryOrder = MemoryOrder::AcqRel;

/// Arrives at the barrier, and reads what the peers wrote before it waits.
#[kernel]
pub unsafe fn reads_before_the_wait(
    comm: DevComm,
    mail: Words,
    out: Words,
    _extra: Extra,
    _n: u32,
) {
    let (team, t) = (comm.lsa_team(), thread::thread_idx_x());
    let mut wrong = 0;
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::new(0));
    // SAFETY: each rank has one word; the read is too early on purpose.
    unsafe {
        if (t as i32) < team.n_ranks {
            mail.lsa(t as i32).store(team.rank as usize, 1);
        }
        let arrival = barrier.arrive(ORDER);
        if (t as i32) < team.n_ranks {
            wrong = u64::from(mail.local().load_acquire(t as usize) != 1);
        }
        arrival.wait(ORDER);
    }
    // SAFETY: `out` has one word per thread.
    unsafe { out.local().store(t as usize, wrong) };
}

/// Puts with a signal, and waits for it only if `n` is 0.
#[kernel(B = gin)]
pub unsafe fn reads_before_the_signal<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, world, gin) = (Coop::cta(), comm.world_team(), comm.gin::<B>(0));
    let signal = extra.signal(&comm, 0);
    let right = (world.rank + 1) % world.n_ranks;
    // SAFETY: each put has its own word; the read is too early on purpose.
    unsafe {
        if thread::thread_idx_x() == 0 {
            mail.local().store(0, 1);
        }
        gin.put(world, right, mail.at(1), mail.at(0), 1).signal(signal.inc()).post(coop);
        if n == 0 {
            gin.wait_signal(coop, signal, 1, ORDER);
        }
        let wrong = u64::from(mail.local().load_acquire(1) != 1);
        gin.flush(coop, ORDER);
        out.local().store(thread::thread_idx_x() as usize, wrong);
    }
}

/// Violates one rule of the device API, which `n` selects. The error must name this file.
#[kernel(B = gin)]
pub unsafe fn breaks_a_rule<B: GinBackend>(
    comm: DevComm,
    mail: Words,
    _out: Words,
    extra: Extra,
    n: u32,
) {
    let (coop, gin) = (Coop::cta(), comm.gin::<B>(0));
    // SAFETY: the host created the buffer for the LSA team.
    let buffer =
        unsafe { LlA2aBuffer::new(&comm, comm.lsa_team(), extra.ll, thread::grid_dim_x()) };
    match n {
        0 => drop(comm.lsa_barrier(coop, BarrierIndex::new(comm.n_lsa_barriers()))),
        1 => drop(comm.gin::<B>(comm.n_gin_contexts())),
        2 => drop(extra.signal(&comm, extra.signals.count)),
        3 => drop(comm.signal(1 << 20)),
        4 => drop(comm.counter(1 << 20)),
        5 => drop(gin.world_barrier(coop, BarrierIndex::new(1 << 10))),
        6 => buffer.with(coop, 0, 2, |session| session.send(comm.lsa_team().n_ranks, 0, 1_u64)),
        7 => buffer.with(coop, 0, 2, |session| session.send(-1, 0, 1_u64)),
        8 => buffer.with(coop, 0, 2, |session| session.send(0, 2, 1_u64)),
        9 => {
            buffer.with(coop, 0, 2, |session: &mut LlA2a<'_, u64>| assert!(session.receive(2) == 1))
        }
        10 => buffer.with(coop, 0, 2, |session| session.broadcast(2, 1_u64)),
        11 => buffer.with(coop, 0, extra.ll.n_slots + 1, |session| session.send(0, 0, 1_u64)),
        12 => buffer.with(coop, 0, extra.ll.n_slots, |session| session.send(0, 0, [0_u64; 2])),
        // SAFETY: none: the put is beyond the window on purpose.
        13 => unsafe { gin.put(comm.world_team(), 0, mail.at(1 << 20), mail.at(0), 1).post(coop) },
        14 => drop(gin.hybrid_barrier(coop, BarrierIndex::new(1 << 10))),
        16 => gin.signal(coop, comm.world_team(), 0, extra.signal(&comm, 0).inc().strong()),
        24 => drop(extra.counter(&comm, extra.counters.count)),
        17.. => breaks_a_rule_of_the_switch(mail.multimem(&comm), mail.local().as_ptr(), n),
        // SAFETY: none: there is no such rank, on purpose.
        _ => unsafe {
            gin.put(comm.world_team(), comm.n_ranks(), mail.at(0), mail.at(0), 1).post(coop)
        },
    }
}

/// Violates rule `n` of NCCL's multicast functions: 16-bit numbers come in pairs, 8-bit sums trap.
#[track_caller]
fn breaks_a_rule_of_the_switch(all: *mut u64, own: *mut u64, n: u32) {
    // The coop is made here: LLVM resolves NCCL's calls through a coop only if it sees its kind.
    let coop = Coop::cta();
    let (all_f16, own_f16) = (all.cast::<f16>(), own.cast::<f16>());
    let (all_bf16, own_bf16) = (all.cast::<bf16>(), own.cast::<bf16>());
    // SAFETY: the ranges are in a window; what else NCCL asks for is violated on purpose.
    unsafe {
        match n {
            17 => nccl::multimem_reduce_sum(coop, all_f16, own_f16, 3),
            18 => nccl::multimem_reduce_sum(coop, all_bf16.add(1), own_bf16, 2),
            19 => nccl::multimem_copy(coop, own_bf16, all_bf16, 1),
            20 => nccl::multimem_copy(coop, own_f16, all_f16.add(3), 4),
            21 => nccl::multimem_reduce_sum_copy(coop, all_f16, all_f16.add(8), 5),
            22 => nccl::multimem_reduce_sum_copy(coop, all_bf16, all_bf16.add(7), 2),
            _ => raw::ncclMultimemReduceSum_F8E4M3(&coop.as_raw(), all.cast(), own.cast(), 8),
        }
    }
}
