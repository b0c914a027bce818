//! Tests of communicators of some of the GPUs, whose ranks differ from the GPUs' numbers.

use cuda_std::multimem;
use devcomm_types::{GinConnectionType, Window as WindowParam, nccl};
use devcomm_types::{HostKernel, IntoArg, KernelArgs, LaunchArgs};
use nccl_device::gin::Proxy;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

use super::*;
use crate::gpu::dev_comm::{CommState, DevCommConfig, make};
use crate::gpu::ranks::{Ranks, Symmetric};

/// A communicator with a device communicator and a window of one 32-bit word per rank.
struct Communicator {
    ranks: Ranks,
    state: CommState,
    words: Symmetric,
}

/// A device communicator as a kernel argument.
#[derive(Clone, Copy)]
struct Comm(nccl::DevComm);

// SAFETY: the value is a device communicator that `make` has filled in.
unsafe impl IntoArg<nccl::DevComm> for Comm {
    fn into_arg(self) -> nccl::DevComm {
        self.0
    }
}

const CONFIG: DevCommConfig = DevCommConfig {
    lsa_barriers: 1,
    lsa_multimem: true,
    barriers: 0,
    rail_gin_barriers: 0,
    world_gin_barriers: 0,
    gin_connection: GinConnectionType::Full,
    has_rails_only: false,
    gin_custom_stride: 1,
    gin_contexts: 4,
    gin_signals: 1,
    gin_counters: 0,
    gin_strong_signals: true,
    gin_queue_depth: 0,
    resources: Vec::new(),
    teams: Vec::new(),
};

impl Communicator {
    fn new(gpus: &Gpus, rank_gpus: &[u32], id: u32) -> Self {
        let ranks = Ranks {
            gpus: rank_gpus.into(),
            lsa_ranks: rank_gpus.len(),
            memory: Rc::clone(&gpus.memory),
            network: Rc::clone(&gpus.network),
        };
        let state = make(&ranks, &CONFIG, 2 * id, |_, rank| rank).unwrap();
        let owner = |rank| Owner::Window { id: 2 * id + 1, rank };
        let words = ranks.symmetric(4 * rank_gpus.len(), 2 * id + 1, owner).unwrap();
        (0..rank_gpus.len()).for_each(|rank| words.allocation.zero(rank));
        Self { ranks, state, words }
    }

    fn dev_comm(&self, rank: usize) -> Comm {
        // The host crate sets the number of requested signals.
        Comm(nccl::DevComm { requested_signals: 1, ..self.state.comms[rank] })
    }

    fn window(&self, rank: usize) -> WindowParam<u32> {
        WindowParam::new(self.words.handle(rank), self.ranks.gpus.len())
    }

    /// Launches one warp of a kernel on the GPU of a rank.
    fn launch<K: HostKernel, A: LaunchArgs<K::Args>>(
        &self,
        gpus: &Gpus,
        rank: usize,
        args: A,
    ) -> GridId {
        // SAFETY: the arguments are this communicator's, which outlives the grid.
        let args = unsafe { K::Args::from_abi(args.into_abi()) };
        let launch = Launch {
            kernel: K::NAME,
            // SAFETY: the window has one word per rank, the device communicator one barrier.
            body: Rc::new(move || unsafe { K::call(args) }),
            ..grid(self.ranks.gpus[rank] as usize, 1, 32, || {})
        };
        gpus.launch(launch).unwrap()
    }

    fn read(&self, rank: usize) -> Vec<u32> {
        words(&self.words.allocation, rank)
    }
}

/// Each rank stores its rank plus 1 into its word of every rank's window.
#[kernel]
unsafe fn introduce(comm: DevComm, words: Window<u32>) {
    let (team, peer) = (comm.lsa_team(), thread::thread_idx_x() as i32);
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    if peer < team.n_ranks {
        // SAFETY: one word per rank, and one rank writes each.
        unsafe { words.lsa(peer).store(team.rank as usize, team.rank as u32 + 1) };
    }
    barrier.sync(MemoryOrder::Release);
}

/// Each rank puts its own word to every rank and, if `flushes`, waits for the other ranks' puts.
#[kernel]
unsafe fn introduce_by_gin(comm: DevComm, words: Window<u32>, flushes: bool) {
    let (team, coop, gin) = (comm.world_team(), Coop::cta(), comm.gin::<Proxy>(0));
    let (me, signal) = (team.rank as usize, comm.signal(0));
    // SAFETY: one word per rank, and one rank writes each.
    unsafe {
        if thread::thread_idx_x() == 0 {
            words.local().store(me, me as u32 + 1);
        }
        for peer in 0..team.n_ranks {
            gin.put(team, peer, words.at(me), words.at(me), 1).signal(signal.inc()).post(coop);
        }
    }
    if flushes {
        gin.wait_signal(coop, signal, team.n_ranks as u64, MemoryOrder::Acquire);
        gin.flush(coop, MemoryOrder::Relaxed);
    }
}

/// Does the same as `introduce`, with multicast stores.
#[kernel]
unsafe fn introduce_to_all(comm: DevComm, words: Window<u32>) {
    let me = comm.lsa_team().rank as usize;
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    if thread::thread_idx_x() == 0 {
        // SAFETY: one word per rank, and one rank writes each; the team has multicast.
        unsafe { multimem::store(words.multimem(&comm).wrapping_add(me), me as u32 + 1) };
    }
    barrier.sync(MemoryOrder::Release);
}

fn work_side_by_side<K: HostKernel>()
where
    (Comm, WindowParam<u32>): LaunchArgs<K::Args>,
{
    for gpus in machines(4, 132) {
        let comms = [[3, 1], [0, 2]].map(|on| Communicator::new(&gpus, &on, on[0]));
        for rank in 0..2 {
            for comm in &comms {
                comm.launch::<K, _>(&gpus, rank, (comm.dev_comm(rank), comm.window(rank)));
            }
        }
        finish(&gpus);
        for comm in &comms {
            assert_eq!([comm.read(0), comm.read(1)], [[1, 2], [1, 2]]);
        }
    }
}

#[test]
fn communicators_of_different_gpus_work_side_by_side() {
    work_side_by_side::<introduce>();
    work_side_by_side::<introduce_to_all>();
}

#[test]
fn the_network_knows_ranks_of_the_communicator_too() {
    for gpus in machines(4, 132) {
        let comm = Communicator::new(&gpus, &[3, 0, 1], 0);
        for rank in 0..3 {
            let flushes = true;
            let args = (comm.dev_comm(rank), comm.window(rank), flushes);
            comm.launch::<introduce_by_gin, _>(&gpus, rank, args);
        }
        finish(&gpus);
        assert_eq!([0, 1, 2].map(|rank| comm.read(rank)), [[1, 2, 3]; 3]);
    }
}

#[test]
fn a_window_is_out_of_reach_for_gpus_that_are_no_ranks() {
    let gpus = machines(4, 132).next().unwrap();
    let comm = Communicator::new(&gpus, &[3, 1], 0);
    let part = comm.words.allocation.part(0).cast::<u32>();
    for gpu in [1, 2] {
        // SAFETY: the pointer is to a word of the window, which outlives the grid.
        let body = move || unsafe { mem::store(part, 7) };
        gpus.launch(grid(gpu, 1, 1, body)).unwrap();
        let step = run_until_idle(&gpus);
        assert_eq!(matches!(step, Step::Failed(Error::OutOfBounds { .. })), gpu == 2, "{step:?}");
    }
}

#[test]
fn a_report_has_world_ranks_and_says_where_a_communicator_counts_otherwise() {
    let gpus = machines(4, 132).next().unwrap();
    let comm = Communicator::new(&gpus, &[2, 3], 0);
    comm.launch::<introduce, _>(&gpus, 0, (comm.dev_comm(0), comm.window(0)));
    assert!(matches!(run_until_idle(&gpus), Step::Stuck));
    let text = Error::Deadlock(gpus.stall()).to_string();
    let line = "\n  rank 2 (rank 0 of its communicator) block 0: 1 thread waits for LSA barrier 0, \
                where rank 3 has not arrived, at ";
    assert!(text.contains(line), "{text}");
    // The peer launches only now.
    comm.launch::<introduce, _>(&gpus, 1, (comm.dev_comm(1), comm.window(1)));
    finish(&gpus);
}

#[test]
fn what_is_under_way_outlives_its_kernel_but_not_its_window() {
    for frees in [false, true] {
        let gpus = machines(2, 132).next().unwrap();
        let (comm, flushes) = (Communicator::new(&gpus, &[1, 0], 0), false);
        let args = (comm.dev_comm(0), comm.window(0), flushes);
        let grid = comm.launch::<introduce_by_gin, _>(&gpus, 0, args);
        while !gpus.is_done(grid) {
            assert!(matches!(gpus.step(), Step::Progress));
        }
        assert_eq!(comm.read(1), [0, 0]);
        let Communicator { state, words, ranks } = comm;
        if !frees {
            finish(&gpus);
            assert_eq!(super::words(&words.allocation, 1), [1, 0]);
            continue;
        }
        drop(words);
        let step = run_until_idle(&gpus);
        let Step::Failed(Error::Misuse { kernel, what, .. }) = step else { panic!("{step:?}") };
        assert!(kernel.starts_with("introduce_by_gin") && what.contains("were freed"), "{what}");
        drop((state, ranks));
    }
}

#[test]
fn a_device_communicator_that_ends_takes_what_is_under_way_with_it() {
    let gpus = machines(2, 132).next().unwrap();
    let (comm, flushes) = (Communicator::new(&gpus, &[0, 1], 0), false);
    let args = (comm.dev_comm(0), comm.window(0), flushes);
    let grid = comm.launch::<introduce_by_gin, _>(&gpus, 0, args);
    while !gpus.is_done(grid) {
        assert!(matches!(gpus.step(), Step::Progress));
    }
    assert!(!gpus.network.is_idle());
    drop(comm);
    finish(&gpus);
}

/// Meets in the first communicator, then in the second one, whose rank 1 does not come.
#[kernel]
unsafe fn meets_in_both(first: DevComm, second: DevComm) {
    for comm in [&first, &second] {
        let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
        barrier.sync(MemoryOrder::AcqRel);
    }
}

/// Meets in a communicator.
#[kernel]
unsafe fn meets_in_one(comm: DevComm) {
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::AcqRel);
}

#[test]
fn a_report_names_ranks_by_the_communicator_of_the_wait() {
    let gpus = machines(4, 132).next().unwrap();
    let [first, second] = [[0, 1], [0, 3]].map(|on| Communicator::new(&gpus, &on, on[1]));
    first.launch::<meets_in_both, _>(&gpus, 0, (first.dev_comm(0), second.dev_comm(0)));
    first.launch::<meets_in_one, _>(&gpus, 1, (first.dev_comm(1),));
    assert!(matches!(run_until_idle(&gpus), Step::Stuck));
    let text = Error::Deadlock(gpus.stall()).to_string();
    assert!(text.contains("LSA barrier 0, where rank 3 has not arrived"), "{text}");
    second.launch::<meets_in_one, _>(&gpus, 1, (second.dev_comm(1),));
    finish(&gpus);
}

#[kernel]
unsafe fn waits_for_a_signal(comm: DevComm) {
    comm.gin::<Proxy>(0).wait_signal(Coop::cta(), comm.signal(0), 1, MemoryOrder::Acquire);
}

#[test]
fn a_report_of_a_kernel_that_only_waits_for_signals_knows_its_communicator() {
    let gpus = machines(4, 132).next().unwrap();
    let comm = Communicator::new(&gpus, &[2, 3], 0);
    comm.launch::<waits_for_a_signal, _>(&gpus, 1, (comm.dev_comm(1),));
    assert!(matches!(run_until_idle(&gpus), Step::Stuck));
    let text = Error::Deadlock(gpus.stall()).to_string();
    assert!(text.contains("rank 3 (rank 1 of its communicator) block 0: "), "{text}");
}
