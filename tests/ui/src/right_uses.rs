//! Correct uses of the device API.
#![deny(unused_must_use)]

use nccl_device::gin::{GinBackend, SignalId};
use nccl_device::{
    BarrierIndex, Coop, DevComm, LlA2a, LlA2aBuffer, MemoryOrder, SignalRange, Window,
};

fn barrier(comm: &DevComm) -> u32 {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    let arrival = barrier.arrive(MemoryOrder::Release);
    arrival.wait(MemoryOrder::Acquire);
    barrier.sync(MemoryOrder::AcqRel);
    7
}

fn put<B: GinBackend>(comm: &DevComm, a: Window<f32>, b: Window<f32>, signals: SignalRange) {
    // SAFETY: this is compiled, and never run.
    unsafe {
        let signal = SignalId::of(comm, signals, 0).inc();
        comm.gin::<B>(0)
            .put(comm.world_team(), 0, a.at(0), b.at(0), 1)
            .signal(signal)
            .post(Coop::cta())
    };
}

fn exchange(buffer: LlA2aBuffer<'_>) -> u64 {
    buffer.with(Coop::cta(), 0, 4, |session: &mut LlA2a<'_, u64>| {
        session.send(0, 0, 5);
        let got = session.receive(0);
        session.end_epoch();
        got
    })
}

fn main() {
    let _ = (barrier as fn(_) -> _, exchange as fn(_) -> _);
    let _ = put::<nccl_device::gin::Proxy>;
}
