//! Tests of the simulated NCCL's windows, device communicators and one-sided operations, and of
//! kernels that use them.

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::prelude::*;
use devcomm_sim::Simulation;
use devcomm_sys::nccl::{
    CommProperties, Config, RawComm, RawWaitSignal, RawWindow, Requirements, ResourceRequirements,
    TeamRequirements,
};
use devcomm_types::nccl::{GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle};
use devcomm_types::{
    DevComm as RawDevComm, GinConnectionType, HostBody, Kernel, Team, Window as RawWindowArg,
};
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

use crate::nccl_threads::*;

const SYMMETRIC: c_int = 1;

impl Thread {
    /// Registers memory as a window, collectively.
    fn window(&self, comm: RawComm, memory: &Memory, bytes: usize) -> RawWindow {
        let mut window = null_mut();
        ok(nccl!(comm_window_register(comm, memory.ptr(), bytes, &raw mut window, SYMMETRIC)));
        window
    }

    fn dev_comm(&self, comm: RawComm, requirements: &Requirements) -> Result<RawDevComm, c_int> {
        let mut dev_comm = RawDevComm::zeroed();
        let code = nccl!(dev_comm_create(comm, requirements, &raw mut dev_comm));
        if code == 0 { Ok(dev_comm) } else { Err(code) }
    }
}

fn lsa_pointer(window: RawWindow, offset: usize, rank: usize) -> *mut c_void {
    let mut out = null_mut();
    ok(nccl!(get_lsa_device_pointer(window, offset, rank as c_int, &raw mut out)));
    out
}

fn peer_pointer(window: RawWindow, offset: usize, peer: c_int) -> (c_int, *mut c_void) {
    let mut out = null_mut();
    let code = nccl!(get_peer_device_pointer(window, offset, peer, &raw mut out));
    (code, out)
}

#[test]
fn a_window_shows_each_ranks_own_memory_to_its_lsa_team() {
    run_ranks(Simulation::new(4).team_size(2), |rank| {
        let comm = rank.init();
        // The window has a different length in each rank.
        let len = 1000 * (rank.me + 1);
        let memory = rank.filled(&vec![rank.me as f32; len]);
        let window = rank.window(comm, &memory, 4 * len);
        rank.barrier(comm);
        let (first, neighbour) = (rank.me & !1, rank.me ^ 1);
        let theirs = lsa_pointer(window, 8, neighbour - first);
        assert_eq!(Memory::at(theirs).read::<f32>(1), [neighbour as f32]);
        assert_eq!(peer_pointer(window, 8, neighbour as c_int), (0, theirs));
        // A store by the neighbour is visible in the rank's own memory.
        rank.barrier(comm);
        Memory::at(theirs).write(&[10.0 + rank.me as f32]);
        rank.barrier(comm);
        assert_eq!(memory.read::<f32>(3)[2], 10.0 + neighbour as f32);
        let across = (rank.me + 2) % 4;
        assert_eq!(peer_pointer(window, 0, across as c_int), (0, null_mut()));
        assert_eq!(peer_pointer(window, 0, 4).0, INVALID_ARGUMENT);
        let end = 4000 * (neighbour + 1);
        assert_eq!(peer_pointer(window, end + 1, neighbour as c_int).0, INVALID_ARGUMENT);
        let (mut own, mut multimem) = (null_mut(), null_mut());
        ok(nccl!(win_get_user_ptr(comm, window, &raw mut own)));
        assert_eq!(own, memory.ptr());
        ok(nccl!(get_lsa_multimem_device_pointer(window, 4, &raw mut multimem)));
        assert!(!multimem.is_null());
        rank.barrier(comm);
        ok(nccl!(comm_window_deregister(comm, window)));
        let again = nccl!(comm_window_deregister(comm, window));
        assert_eq!(again, INVALID_ARGUMENT);
        ok(nccl!(comm_window_deregister(comm, null_mut())));
        assert_eq!(peer_pointer(window, 0, 0).0, INVALID_ARGUMENT);
    });
}

#[test]
fn what_makes_no_window_is_refused_or_null_on_all_ranks() {
    run_ranks(Simulation::new(2), |rank| {
        let comm = rank.init();
        let memory = rank.zeroed(4096);
        let mut window = without_provenance_mut(64);
        let register = |address: *mut c_void, bytes, flags, out: *mut RawWindow| {
            nccl!(comm_window_register(comm, address, bytes, out, flags))
        };
        let out = &raw mut window;
        assert_eq!(register(memory.ptr().wrapping_byte_add(64), 64, 1, out), INVALID_ARGUMENT);
        assert_eq!(register(memory.ptr(), 4 * 4096 + 1, 1, out), INVALID_ARGUMENT);
        assert_eq!(register(memory.ptr(), 0, 1, out), INVALID_ARGUMENT);
        assert_eq!(register(memory.ptr(), 64, 1 | 4, out), INVALID_ARGUMENT);
        // Rank 1's memory is not from `ncclMemAlloc`.
        let pinned = rank.pinned(2 * 4096);
        let pinned = pinned.wrapping_byte_add(pinned.align_offset(4096));
        let address = if rank.me == 0 { memory.ptr() } else { pinned };
        ok(register(address, 4096, 1, out));
        // SAFETY: `out` is the address of `window`, which the call has written.
        assert!(unsafe { *out }.is_null());
        let differ = register(memory.ptr(), 64, rank.me as c_int, out);
        assert_eq!(differ, INVALID_USAGE, "flags that differ");
    });
}

#[test]
fn registered_buffers_and_properties_are_there() {
    run_ranks(Simulation::new(4).team_size(2).multimem(false), |rank| {
        let comm = rank.init();
        let (memory, mut handle) = (rank.zeroed(64), null_mut());
        let mut props = CommProperties::new();
        ok(nccl!(comm_register(comm, memory.ptr(), 256, &raw mut handle)));
        ok(nccl!(comm_deregister(comm, handle)));
        assert_eq!(nccl!(comm_deregister(comm, handle)), INVALID_ARGUMENT);
        ok(nccl!(comm_query_properties(comm, &raw mut props)));
        let team = nccl!(team_rail(comm));
        assert_eq!(team, Team { n_ranks: 2, rank: rank.me as i32 / 2, stride: 2 });
        assert_eq!(nccl!(team_rank_to_world(comm, team, 1)), 2 + rank.me as c_int % 2);
        assert_eq!(nccl!(team_rank_to_lsa(comm, team, team.rank)), rank.me as c_int % 2);
        assert_eq!(nccl!(team_world(null_mut())).n_ranks, 0);
        assert_eq!(
            (props.rank, props.n_ranks, props.cuda_dev),
            (rank.me as c_int, 4, rank.me as c_int)
        );
        assert_eq!((props.n_lsa_teams, props.multimem_support, props.gin_type), (2, 0, 2));
        assert_eq!(
            (props.device_api_support, props.host_rma_support, props.cft_support),
            (1, 1, 0)
        );
        let multimem = Requirements { lsa_multimem: true, ..Requirements::new() };
        assert_eq!(rank.dev_comm(comm, &multimem).unwrap_err(), INVALID_USAGE);
    });
}

/// Sums all ranks' `send[i]` to `recv[i]`, by loads and stores.
#[kernel]
unsafe fn allreduce_in_windows(comm: DevComm, send: Window<f32>, recv: Window<f32>, count: usize) {
    let team = comm.lsa_team();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire);
    let mut i = thread::index_1d() as usize;
    while i < count {
        // SAFETY: `i` is below `count`; the barriers order the accesses.
        let sum = (0..team.n_ranks).map(|peer| unsafe { send.lsa(peer).load(i) }).sum();
        // SAFETY: the windows have `count` elements, and each thread stores its own ones.
        unsafe { recv.local().store(i, sum) };
        i += (thread::grid_dim_x() * thread::block_dim_x()) as usize;
    }
    barrier.sync(MemoryOrder::Release);
}

/// Returns the body of a kernel.
fn body<K: Kernel>() -> HostBody {
    K::BODY.unwrap()
}

#[test]
fn a_kernel_uses_windows_and_a_device_communicator() {
    const COUNT: usize = 777;
    for simulation in [Simulation::new(4), Simulation::new(3).seed(7)] {
        let n = simulation.gpus();
        run_ranks(simulation, |rank| {
            // Ranks and GPUs are numbered in opposite order.
            let all = rank.init();
            let comm = rank.split(all, 0, -(rank.me as c_int));
            let me = n - 1 - rank.me;
            assert_eq!(rank.rank_and_size(comm), (me, n));
            let (send, recv) = (rank.filled(&vec![me as f32; COUNT]), rank.zeroed(COUNT));
            let windows = [&send, &recv].map(|memory| rank.window(comm, memory, 4 * COUNT));
            let barriers = Requirements { lsa_barrier_count: 2, ..Requirements::new() };
            let dev_comm = rank.dev_comm(comm, &barriers).unwrap();
            assert_eq!((dev_comm.rank, dev_comm.lsa_size), (me as i32, n as i32));
            let args = windows.map(|handle| RawWindowArg::<f32>::new(handle, COUNT));
            let (stream, count) = (rank.stream(), COUNT);
            rank.launch_kernel(
                &body::<allreduce_in_windows>(),
                (2, 64),
                stream,
                &[
                    (&raw const dev_comm).cast(),
                    (&raw const args[0]).cast(),
                    (&raw const args[1]).cast(),
                    (&raw const count).cast(),
                ],
            );
            rank.synchronize(stream);
            let sum = (n * (n - 1) / 2) as f32;
            assert_eq!(recv.read::<f32>(COUNT), vec![sum; COUNT]);
            rank.barrier(comm);
            ok(nccl!(dev_comm_destroy(comm, &raw const dev_comm)));
            let again = nccl!(dev_comm_destroy(comm, &raw const dev_comm));
            assert_eq!(again, INVALID_ARGUMENT);
            rank.destroy(comm);
        });
    }
}

#[test]
fn all_requirements_are_met_at_places_that_are_the_same_on_all_ranks() {
    let made = run_ranks(Simulation::new(4).team_size(2), |rank| {
        let comm = rank.init();
        let (world, lsa) = (nccl!(team_world(comm)), nccl!(team_lsa(comm)));
        let (mut barriers, mut gin) = (LsaBarrierHandle::default(), GinBarrierHandle::default());
        let (mut a2a, mut multimem) = (LlA2aHandle::default(), MultimemHandle::NULL);
        let mut nodes = [ResourceRequirements::NONE; 3];
        assert_eq!(nccl!(ll_a2a_calc_slots(10, 12)), 20, "a slot holds 8 bytes");
        let [first, second, third] = nodes.each_mut().map(std::ptr::from_mut);
        ok(nccl!(lsa_barrier_create_requirement(lsa, 4, &raw mut barriers, first)));
        ok(nccl!(gin_barrier_create_requirement(comm, world, 3, &raw mut gin, second)));
        ok(nccl!(ll_a2a_create_requirement(2, 20, &raw mut a2a, third)));
        // An LSA barrier has three words and one for each rank, a GIN barrier a signal for each
        // rank, and a block of an LL all-to-all a header and two banks of slots of 16 bytes.
        let bytes = 4 * (3 + 2) * 4;
        assert_eq!((nodes[0].buffer_size, nodes[1].gin_signal_count), (bytes, 3 * 4));
        assert_eq!(nodes[2].buffer_size, 2 * (1 + 2 * 20) * 16);
        nodes[1].next = &raw mut nodes[2];
        nodes[0].next = &raw mut nodes[1];
        let requirements = Requirements {
            resource_requirements_list: &raw mut nodes[0],
            team_requirements_list: &mut TeamRequirements {
                next: null_mut(),
                team: lsa,
                multimem: true,
                out_multimem_handle: &raw mut multimem,
            },
            lsa_multimem: true,
            barrier_count: 2,
            lsa_barrier_count: 5,
            rail_gin_barrier_count: 1,
            gin_connection_type: 1,
            gin_context_count: 3,
            gin_signal_count: 6,
            gin_counter_count: 7,
            ..Requirements::new()
        };
        let dev_comm = rank.dev_comm(comm, &requirements).unwrap();
        assert_eq!((dev_comm.n_ranks, dev_comm.lsa_size), (4, 2));
        assert_eq!((dev_comm.gin_context_count, dev_comm.gin_counter_count), (3, 7));
        assert_eq!(dev_comm.lsa_barrier.n_barriers, 5);
        assert!(!multimem.base.is_null() && !dev_comm.lsa_multimem.base.is_null());
        assert_eq!((barriers.n_barriers, a2a.n_slots, gin.signal0), (4, 20, 6));
        (barriers.buffer, a2a.buffer, dev_comm.lsa_barrier, dev_comm.rail_gin_barrier)
    });
    assert!(made.iter().all(|handles| *handles == made[0]), "{made:?}");
    assert!(made[0].0 != 0 && made[0].0 != made[0].1);
}

#[test]
fn requirements_that_cannot_be_met_or_differ_are_refused_on_all_ranks() {
    run_ranks(Simulation::new(4).team_size(2), |rank| {
        let comm = rank.init();
        let none = Requirements::new();
        let refused = |requirements: Requirements, code: c_int, reason: &str| {
            assert_eq!(rank.dev_comm(comm, &requirements).unwrap_err(), code);
            let text = rank.last_error(null_mut());
            assert!(text.contains(reason), "{text}");
        };
        refused(Requirements { gin_signal_count: 1, ..none }, INVALID_ARGUMENT, "gin_connection");
        let rails = Requirements { gin_connection_type: 2, world_gin_barrier_count: 1, ..none };
        refused(rails, INVALID_ARGUMENT, "world GIN barriers");
        refused(Requirements { cft_caps: 1, ..none }, INVALID_USAGE, "no CFT");
        refused(Requirements { gin_type: 3, ..none }, INVALID_USAGE, "PROXY");
        refused(Requirements { version: 23204, ..none }, INVALID_USAGE, "2.32.3");
        let negative = Requirements { lsa_barrier_count: -1, ..none };
        refused(negative, INVALID_ARGUMENT, "-1 LSA barriers");
        let many = 1 << 20;
        let counters = Requirements {
            gin_connection_type: 2,
            gin_context_count: many,
            gin_counter_count: many,
            ..none
        };
        refused(counters, INVALID_ARGUMENT, "1048576 counters each");
        let most = c_int::MAX;
        let slots =
            Requirements { lsa_ll_a2a_block_count: most, lsa_ll_a2a_slot_count: most, ..none };
        refused(slots, INVALID_ARGUMENT, "resources of more than");
        let differ = Requirements { lsa_barrier_count: 1 + rank.me as c_int / 3, ..none };
        refused(differ, INVALID_USAGE, "rank 3 of 4 ranks for");
    });
}

#[test]
fn puts_and_signals_reach_the_peers_window() {
    run_ranks(Simulation::new(3).seed(5), |rank| {
        let config = Config { num_rma_sig: 8, num_rma_ctx: 3, ..Config::new() };
        let (comm, code) = rank.init_with(config);
        ok(code);
        let (stream, next, previous) = (rank.stream(), (rank.me + 1) % 3, (rank.me + 2) % 3);
        let early = nccl!(signal(next as c_int, 0, 0, 0, comm, stream));
        assert_eq!(early, INVALID_USAGE, "before the first window");
        let (from, to) = (rank.filled(&[rank.me as f32; 4]), rank.zeroed(8));
        let windows = [(&from, 16), (&to, 32)].map(|(memory, n)| rank.window(comm, memory, n));
        let put = |at: usize, signal, context, window| {
            let (from, peer) = (from.ptr(), next as c_int);
            nccl!(put_signal(from, 2, F32, peer, window, at, signal, context, 0, comm, stream))
        };
        assert_eq!(put(28, 0, 0, windows[1]), INVALID_ARGUMENT, "beyond the window");
        assert_eq!(put(0, 8, 0, windows[1]), INVALID_ARGUMENT, "signal 8 of 8");
        ok(put(12, 7, 2, windows[1]));
        ok(nccl!(signal(next as c_int, 7, 2, 0, comm, stream)));
        let (op_count, peer) = (2, previous as c_int);
        let mut wait = RawWaitSignal { op_count, peer, signal_index: 7, context: 2 };
        ok(nccl!(wait_signal(1, &raw mut wait, comm, stream)));
        rank.synchronize(stream);
        let theirs = previous as f32;
        assert_eq!(to.read::<f32>(6), [0.0, 0.0, 0.0, theirs, theirs, 0.0]);
    });
}

#[test]
fn a_list_with_two_waits_for_a_signal_needs_it_twice() {
    run_ranks(Simulation::new(2), |rank| {
        let config = Config { rma_eager_init: 1, ..Config::new() };
        let (comm, code) = rank.init_with(config);
        ok(code);
        let (waiting, signaling, peer) = (rank.stream(), rank.stream(), 1 - rank.me as c_int);
        let mut waits = [RawWaitSignal { op_count: 1, peer, signal_index: 0, context: 0 }; 2];
        ok(nccl!(wait_signal(2, waits.as_mut_ptr(), comm, waiting)));
        for _ in 0..2 {
            ok(nccl!(signal(peer, 0, 0, 0, comm, signaling)));
            rank.synchronize(signaling);
        }
        rank.synchronize(waiting);
    });
}

#[test]
fn the_network_connects_all_ranks_or_rails_or_none() {
    use GinConnectionType as N;
    for (network, gin, railed, device_api) in [(N::Rail, 0, 2, 1), (N::None, 0, 0, 0)] {
        run_ranks(Simulation::new(4).team_size(2).network(network), |rank| {
            let (comm, mut props) = (rank.init(), CommProperties::new());
            ok(nccl!(comm_query_properties(comm, &raw mut props)));
            assert_eq!((props.gin_type, props.railed_gin_type), (gin, railed));
            assert_eq!(
                (props.device_api_support, props.host_rma_support),
                (device_api, device_api)
            );
            let connected =
                |gin_connection_type| Requirements { gin_connection_type, ..Requirements::new() };
            assert_eq!(rank.dev_comm(comm, &connected(1)).unwrap_err(), INVALID_ARGUMENT);
            assert_eq!(rank.dev_comm(comm, &connected(2)).is_ok(), network == N::Rail);
        });
    }
}

/// Spins until the flag at address `flag` is set.
#[kernel]
unsafe fn linger(flag: u64) {
    // SAFETY: the launch passes a word that the host sets.
    let flag = unsafe { AtomicU32::from_ptr(flag as *mut u32) };
    while flag.load(Order::Acquire, Scope::Sys) == 0 {
        thread::nanosleep(20);
    }
}

#[test]
fn an_abort_waits_for_the_kernels_of_its_gpu() {
    run_ranks(Simulation::new(1), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let flag = rank.pinned(4).cast::<u32>();
        // SAFETY: pinned memory of four bytes; the kernel only reads it.
        unsafe { flag.write_volatile(0) };
        let address = flag as u64;
        rank.launch_kernel(&body::<linger>(), (1, 1), stream, &[(&raw const address).cast()]);
        let addresses = (comm as usize, flag as usize);
        std::thread::scope(|scope| {
            let ticket = rank.machine.ticket("aborts");
            scope.spawn(move || {
                let _attached = ticket.attach();
                ok(nccl!(comm_abort(addresses.0 as RawComm)));
                // SAFETY: the address is of a word that the test frees after this.
                assert_eq!(unsafe { (addresses.1 as *const u32).read_volatile() }, 1);
            });
            // Each call lets other threads run, so the abort has begun before the flag is set.
            for _ in 0..20 {
                rank.stream();
            }
            // SAFETY: the address is of a word that the test frees after this.
            unsafe { flag.write_volatile(1) };
            rank.synchronize(stream);
        });
    });
}

#[test]
fn ranks_that_wait_for_each_other_in_vain_are_told_each_ranks_wait() {
    let errors = run_ranks(Simulation::new(2), |rank| {
        let (comm, stream) = (rank.init(), rank.stream());
        let b = rank.zeroed(1);
        let peer = 1 - rank.me as c_int;
        ok(nccl!(recv(b.ptr(), 1, F32, peer, comm, stream)));
        let error = rank.wait_for(stream);
        rank.abort(comm);
        error
    });
    // The longest error is the deadlock report, which describes both ranks.
    let report = errors.iter().flatten().max_by_key(|text| text.len()).unwrap();
    for part in ["GPU 0", "GPU 1: rank 1 of 2 ranks", "receive from rank 1 of 1 Float32"] {
        assert!(report.contains(part), "{report}");
    }
    // A call that needs all ranks reports the deadlock too.
    let errors = run_ranks(Simulation::new(2), |rank| {
        let (comm, mut child) = (rank.init(), null_mut());
        if rank.me == 0 {
            return String::new();
        }
        let code = nccl!(comm_split(comm, 0, 0, &raw mut child, null_mut()));
        assert_eq!((code, child.is_null()), (SYSTEM_ERROR, true));
        rank.last_error(null_mut())
    });
    assert!(errors[1].contains("rank 1 is in ncclCommSplit"), "{}", errors[1]);
}
