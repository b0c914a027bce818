//! Tests of worlds of simulated machines: time, scheduling, and operations that only GPUs support.
#![cfg(feature = "simulator")]

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use devcomm_host::{
    Context, DriverError, Error, Kernels, Library, MultiGpu, OLDEST_VERSION, Rank, Result,
    Simulation, StateError, World, visible_gpus,
};

fn world(simulation: Simulation) -> World {
    World::builder().simulate(simulation).from_env().unwrap()
}

#[test]
fn every_rank_has_a_gpu_of_its_own_and_knows_that_it_is_simulated() {
    let world = World::simulated(3).unwrap();
    assert!(world.is_simulated() && world.n_ranks() == 3);
    let ranks = world.run(|rank| {
        assert!(rank.is_simulated());
        assert_eq!(visible_gpus()?, 3);
        Ok::<_, Error>((rank.rank(), rank.device(), rank.context().device_name()?))
    });
    let ranks = ranks.unwrap();
    assert!(ranks.iter().enumerate().all(|(n, rank)| (rank.0, rank.1) == (n, n)), "{ranks:?}");
}

/// Returns this process's TCP and UDP sockets. It has Unix sockets too if another test runs a world
/// at the same time, which handles SIGUSR1 by a pair of them.
fn sockets() -> BTreeSet<String> {
    let tables = ["tcp", "tcp6", "udp", "udp6"].map(|name| format!("/proc/self/net/{name}"));
    let tables = tables.map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let lines = tables.iter().flat_map(|table| table.lines());
    // The tenth column of a table is the socket's inode, which is in the link of its descriptor.
    let inode = |line: &str| Some(format!("socket:[{}]", line.split_whitespace().nth(9)?));
    let of_networks: BTreeSet<String> = lines.filter_map(inode).collect();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let targets =
        open.filter_map(|path| path.read_link().ok()?.into_os_string().into_string().ok());
    targets.filter(|target| of_networks.contains(target)).collect()
}

#[test]
fn ranks_that_are_threads_open_no_socket() {
    let known = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    assert_eq!(sockets().len(), 1);
    drop(known);
    let ran = World::simulated(3).unwrap().run(|rank| {
        rank.communicator()?.barrier()?;
        assert_eq!(sockets(), BTreeSet::new());
        rank.barrier()
    });
    ran.unwrap();
}

#[test]
fn a_world_of_more_ranks_than_the_machine_has_gpus_is_refused() {
    let world = World::builder().simulate(Simulation::new(2)).threads(3);
    assert!(matches!(world, Err(Error::Driver(DriverError::TooFewGpus { asked: 3, visible: 2 }))));
    assert!(matches!(World::simulated(0), Err(Error::InvalidInput { .. })));
}

/// Returns the ranks in the order in which they return from `synchronize`, which each calls 10
/// times.
fn order(simulation: Simulation) -> Vec<usize> {
    let reached = Mutex::new(Vec::new());
    let ran = world(simulation).run(|rank| {
        let stream = rank.stream()?;
        for _ in 0..10 {
            stream.synchronize()?;
            reached.lock().unwrap().push(rank.rank());
        }
        Ok::<_, Error>(())
    });
    ran.unwrap();
    reached.into_inner().unwrap()
}

#[test]
fn the_order_of_ranks_is_a_function_of_the_seed() {
    let seeded = |seed| order(Simulation::new(4).seed(seed));
    assert_eq!(seeded(1), seeded(1));
    assert!((2..10).any(|seed| seeded(seed) != seeded(1)));
    assert_eq!(order(Simulation::new(4)), order(Simulation::new(4)));
}

#[test]
fn ranks_that_wait_for_each_other_in_a_circle_are_told_each_ranks_wait() {
    let ended = World::simulated(2).unwrap().run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let buffer = comm.mem_alloc::<f32>(16)?;
        comm.recv(&buffer, 1 - rank.rank(), &stream)?;
        stream.synchronize()
    });
    let error = ended.unwrap_err();
    assert!(matches!(error, Error::State(StateError::Deadlock { .. })), "{error}");
    let text = error.to_string();
    assert!(text.contains("rank 0") && text.contains("rank 1"), "{text}");
}

#[test]
fn a_deadline_that_passes_is_no_deadlock() {
    let ended = World::simulated(2).unwrap().run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let buffer = comm.mem_alloc::<f32>(16)?;
        if rank.is_root() {
            comm.recv(&buffer, 1, &stream)?;
            return stream.synchronize_within(Duration::from_secs(600));
        }
        rank.barrier()
    });
    let error = ended.unwrap_err();
    let waited = match error {
        Error::State(StateError::DeadlinePassed { waited }) => waited,
        other => panic!("{other}"),
    };
    assert!(waited >= Duration::from_secs(600), "{waited:?}");
}

#[test]
fn a_rank_that_fails_ends_the_world_with_its_error_and_no_time_passes() {
    let start = Instant::now();
    let ended = World::simulated(4).unwrap().run(|rank| -> Result<()> {
        let _comm = rank.communicator()?;
        if rank.rank() == 2 {
            return Err(Error::InvalidInput { what: "rank 2 fails".to_owned() });
        }
        rank.barrier()
    });
    assert_eq!(ended.unwrap_err().to_string(), "rank 2 fails");
    // Timeouts elapse on the simulated machine's clock, not in real time.
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn a_panic_of_a_rank_is_the_worlds_error() {
    let ended = World::simulated(2).unwrap().run(|rank| -> Result<()> {
        assert!(rank.is_root(), "not this one");
        rank.barrier()
    });
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("rank 1 panicked") && error.contains("not this one"), "{error}");
}

#[test]
fn one_world_after_another_runs_on_one_thread() {
    for n in [1, 4, 2] {
        let world = World::simulated(n).unwrap();
        for _ in 0..2 {
            let ranks = world.run(|rank| rank.all_gather(&[rank.rank() as u32])).unwrap();
            let all: Vec<Vec<u32>> = (0..n as u32).map(|rank| vec![rank]).collect();
            assert_eq!(ranks, vec![all; n]);
        }
    }
}

fn on_one(f: impl Fn(&Rank) -> Result<()> + Sync) {
    World::simulated(1).unwrap().run(f).unwrap();
}

#[test]
fn what_only_gpus_have_is_refused_by_name() {
    let refused = |result: Result<()>, name: &str| {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::Driver(DriverError::NotSimulated { .. })) && error.is_hardware()
        );
        assert!(error.to_string().contains(name), "{error}");
    };
    on_one(|rank| {
        // SAFETY: nothing is launched.
        let loaded = unsafe { Kernels::load_files(rank.context(), &["a/sum.cubin"]) };
        refused(loaded.map(drop), "sum.cubin");
        let library = Library::load("/lib/libnccl.so.2".as_ref(), OLDEST_VERSION);
        refused(library.map(drop), "/lib/libnccl.so.2");
        Ok(())
    });
}

#[test]
fn a_rank_opens_the_machines_library_and_its_contexts() {
    on_one(|rank| {
        let library = Library::open(None)?;
        assert_eq!(library.version(), rank.library().version());
        assert_eq!(library.path(), rank.library().path());
        Context::new(0)?.stream()?.synchronize()?;
        MultiGpu::all(&library)?.synchronize()
    });
}
