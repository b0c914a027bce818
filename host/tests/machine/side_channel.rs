//! Tests of communicators of other libraries whose ranks exchange over a channel.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devcomm_host::{
    CommConfig, Communicator, Context, DevCommRequirements, Error, Rank, ReduceOp, Result,
    SideChannel, WorldError,
};
use parking_lot::Mutex;

use crate::support::{ranks, unchecked_world};

/// A store of this process.
#[derive(Default)]
struct Store(Mutex<HashMap<String, Vec<u8>>>);

/// One rank's access to the store, until it falls silent.
struct Channel {
    store: Arc<Store>,
    silent: AtomicBool,
}

impl Channel {
    fn new(store: &Arc<Store>) -> Arc<Self> {
        Arc::new(Self { store: Arc::clone(store), silent: AtomicBool::new(false) })
    }
}

impl SideChannel for Channel {
    fn set(&self, key: &str, value: &[u8]) -> io::Result<()> {
        if !self.silent.load(Ordering::Relaxed) {
            self.store.0.lock().insert(key.to_owned(), value.to_vec());
        }
        Ok(())
    }

    fn get(&self, key: &str, _: Duration) -> io::Result<Option<Vec<u8>>> {
        Ok(self.store.0.lock().get(key).cloned())
    }

    fn remove(&self, key: &str) -> io::Result<()> {
        self.store.0.lock().remove(key);
        Ok(())
    }
}

/// How long a rank may be silent before it is lost.
const DEADLINE: Duration = Duration::from_secs(10);

/// Returns the communicator of `owner`, as another library's, on a context of its own.
fn foreign(
    rank: &Rank,
    owner: &Communicator,
    channel: &Arc<Channel>,
) -> Result<(Context, Communicator)> {
    let context = Context::new(rank.device())?;
    let channel = Arc::clone(channel) as Arc<dyn SideChannel>;
    let (library, raw, deadline) = (rank.library(), owner.as_raw(), Some(DEADLINE));
    // SAFETY: `owner` is of this library and GPU, and outlives what is created from it here.
    let comm = unsafe { Communicator::from_raw_with(library, &context, raw, channel, deadline) }?;
    Ok((context, comm))
}

fn assert_lost<T>(result: Result<T>, lost: usize, because: &str) {
    match result.err() {
        Some(Error::World(WorldError::RankLost { rank, why })) => {
            assert!(rank == lost && why.contains(because), "rank {rank}: {why}");
        }
        other => panic!("{other:?}"),
    }
}

/// Checks that requirements that differ are an error.
fn differ(rank: &Rank, comm: &Communicator) {
    let error =
        comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1 + rank.rank() as u32));
    let error = error.err().unwrap();
    assert!(
        matches!(error, Error::World(WorldError::OptionsDiffer { .. })),
        "rank {}: {error}",
        rank.rank()
    );
}

#[test]
fn requirements_that_differ_fail_on_all_ranks() {
    let store = Arc::new(Store::default());
    ranks(3, |rank| {
        let owner = rank.new_communicator(&CommConfig::new())?;
        let (_context, comm) = foreign(rank, &owner, &Channel::new(&store))?;
        differ(rank, &comm);
        let window = comm.window::<f32>(8 * (1 + rank.rank()))?;
        assert_eq!((window.len_of(2), window.min_len()), (Some(24), 8));
        let half = comm.split(Some((rank.rank() == 2).into()), 0, &Default::default())?.unwrap();
        let lengths = half.window::<f32>(4 + rank.rank())?;
        assert_eq!(
            lengths.len_of(half.n_ranks() - 1),
            Some(if half.n_ranks() == 2 { 5 } else { 6 })
        );
        rank.barrier()
    });
    // Each of 3 ranks leaves the last exchange of both communicators, and its heartbeat.
    assert!(store.0.lock().len() <= 3 * 3, "{:?}", store.0.lock().keys());
}

#[test]
fn the_connections_of_a_world_serve_too() {
    ranks(3, |rank| {
        let owner = rank.new_communicator(&CommConfig::new())?;
        // SAFETY: the communicator outlives the one that is made of it.
        let comm = unsafe { rank.communicator_from_raw(owner.as_raw()) }?;
        differ(rank, &comm);
        assert_eq!(comm.window::<f32>(8 + rank.rank())?.min_len(), 8);
        let half = owner.split(Some((rank.rank() == 2).into()), 0, &Default::default())?.unwrap();
        // SAFETY: the communicator outlives the one that is made of it.
        let other = unsafe { rank.communicator_from_raw(half.as_raw()) };
        assert!(matches!(other, Err(Error::InvalidInput { .. })));
        Ok(())
    });
}

#[test]
fn a_channel_that_falls_silent_is_a_lost_rank() {
    let store = Arc::new(Store::default());
    let world = unchecked_world(3);
    let ran = world.run(|rank| {
        let (owner, channel) = (rank.new_communicator(&CommConfig::new())?, Channel::new(&store));
        let (context, comm) = foreign(rank, &owner, &channel)?;
        let (stream, window) = (context.stream()?, comm.window::<f32>(8)?);
        if rank.rank() == 1 {
            channel.silent.store(true, Ordering::Relaxed);
            return rank.barrier();
        }
        // Rank 1 does not take part.
        comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
        let why = "nothing was heard from it for 10 s";
        assert_lost(stream.synchronize(), 1, why);
        assert_lost(comm.window::<f32>(8), 1, why);
        rank.barrier()
    });
    ran.unwrap();
}

#[test]
fn a_rank_that_does_not_come_or_has_ended_is_lost() {
    for ends in [false, true] {
        let store = Arc::new(Store::default());
        ranks(3, |rank| {
            let owner = rank.new_communicator(&CommConfig::new())?;
            let (_context, comm) = foreign(rank, &owner, &Channel::new(&store))?;
            if rank.rank() == 2 {
                let kept = (!ends).then_some(comm);
                rank.barrier()?;
                drop(kept);
                return Ok(());
            }
            let why = if ends {
                "its communicator had ended when others waited for it"
            } else {
                "in register_window"
            };
            assert_lost(comm.window::<f32>(8), 2, why);
            rank.barrier()
        });
    }
}
