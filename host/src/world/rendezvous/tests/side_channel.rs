//! Tests of exchanges over a store of keys and values.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::super::SideChannel;
use super::super::side_channel;
use super::*;
use crate::communicator::peers::{NEVER, Peers};
use crate::device::Health;
use crate::error::{Error, WorldError};
use crate::machine::Machine;
use crate::world::run::run_threads;

#[derive(Default)]
struct Store {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl SideChannel for Store {
    fn set(&self, key: &str, value: &[u8]) -> io::Result<()> {
        self.values.lock().insert(key.to_owned(), value.to_vec());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> io::Result<Option<Vec<u8>>> {
        let mut values = self.values.lock();
        let absent = |values: &mut HashMap<String, Vec<u8>>| !values.contains_key(key);
        self.changed.wait_while_for(&mut values, absent, timeout);
        Ok(values.get(key).cloned())
    }
}

/// A channel that ends.
struct BrokenChannel;

impl SideChannel for BrokenChannel {
    fn set(&self, _: &str, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn get(&self, _: &str, _: Duration) -> io::Result<Option<Vec<u8>>> {
        Err(io::ErrorKind::BrokenPipe.into())
    }
}

/// Joins as three ranks, each in its thread, and runs `f`.
fn with_three_ranks(deadline: Duration, f: impl Fn(usize, Arc<dyn Peers>) + Sync) {
    let store = Arc::new(Store::default());
    thread::scope(|scope| {
        for rank in 0..3 {
            let (f, store) = (&f, Arc::clone(&store));
            scope.spawn(move || {
                let health = Health::new(Machine::Gpus, None);
                f(rank, side_channel::join(store, health, Some(deadline), rank, 3).unwrap());
            });
        }
    });
}

#[test]
fn ranks_and_their_subsets_exchange_over_a_channel() {
    with_three_ranks(AMPLE, |rank, world| {
        assert_eq!(world.hosts(), vec![super::super::host_name(); 3]);
        let pair = (rank != 1).then(|| world.subset(&[2, 0]).unwrap());
        for round in 0..50 {
            let all = world.all_gather("all".into(), &[rank as u8, round], NEVER).unwrap();
            assert_eq!(all, [0, 1, 2].map(|rank| [rank, round]));
            if let Some(pair) = &pair {
                let all = pair.all_gather("pair".into(), &[rank as u8; 5], NEVER).unwrap();
                assert_eq!(all, [[2; 5], [0; 5]]);
            }
        }
        let call = format!("call {}", rank / 2);
        let error = world.all_gather(call.as_str().into(), &[], NEVER).unwrap_err();
        assert!(matches!(error, Error::World(WorldError::CallsDiffer { .. })), "{error}");
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_with_the_call() {
    let told = std::sync::Barrier::new(3);
    with_three_ranks(Duration::from_secs(2), |rank, world| {
        if rank > 0 {
            let error = world.all_gather("split".into(), &[], NEVER).unwrap_err().to_string();
            let why =
                "rank 0 is lost: after 2 s in split, ranks 1, 2 waited and rank 0 has not come";
            assert_eq!(error, why);
        }
        told.wait();
    });
}

#[test]
#[cfg(feature = "simulator")]
fn a_rank_may_join_until_the_deadline() {
    let machine = Machine::simulate(&devcomm_sim::Simulation::new(2), None).unwrap();
    let store = Arc::new(Store::default());
    run_threads(&machine, 2, None, |rank| {
        let rank = rank.rank();
        if rank == 1 {
            machine.sleep(Duration::from_secs(60));
        }
        let health = Health::new(machine.clone(), None);
        let deadline = Some(Duration::from_secs(600));
        let world = side_channel::join(Arc::clone(&store) as _, health, deadline, rank, 2)?;
        assert_eq!(world.all_gather("all".into(), &[rank as u8], NEVER)?, [[0], [1]]);
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// A store that gets the numbers of rank 0's heartbeat only after its end.
#[derive(Default)]
struct LateHeartbeat {
    store: Store,
    /// The values of the heartbeat.
    beats: Mutex<Vec<Vec<u8>>>,
}

const ENDED: &[u8] = b"ended";

impl SideChannel for LateHeartbeat {
    fn set(&self, key: &str, value: &[u8]) -> io::Result<()> {
        if key == "alive/0" {
            while value != ENDED && self.beats.lock().is_empty() {
                thread::sleep(Duration::from_millis(1));
            }
            self.beats.lock().push(value.to_vec());
        }
        self.store.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> io::Result<Option<Vec<u8>>> {
        self.store.get(key, timeout)
    }
}

#[test]
fn the_end_is_a_ranks_last_heartbeat_also_if_another_one_was_on_its_way() {
    let store = Arc::new(LateHeartbeat::default());
    thread::scope(|scope| {
        for rank in 0..2 {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let health = Health::new(Machine::Gpus, None);
                drop(side_channel::join(store, health, Some(AMPLE), rank, 2).unwrap());
            });
        }
    });
    let start = Instant::now();
    let beats = loop {
        let beats = store.beats.lock().clone();
        if beats.len() > 2 || start.elapsed() > Duration::from_secs(5) {
            break beats;
        }
        thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(beats, [ENDED, &[0; 8], ENDED]);
}

#[test]
fn a_channel_that_ends_is_an_error() {
    let health = Health::new(Machine::Gpus, None);
    let error = side_channel::join(Arc::new(BrokenChannel), health, None, 0, 2).err().unwrap();
    let text = error.to_string();
    // The error is that of the call or of the heartbeat, whichever fails first.
    assert!(text.contains("side channel") && text.contains("broken pipe"), "{text}");
}

#[test]
fn a_forked_child_does_not_end_its_parents_heartbeat() {
    let (store, health) = (Arc::new(Store::default()), Health::new(Machine::Gpus, None));
    let channel: Arc<Store> = Arc::clone(&store);
    let world = side_channel::join(channel, health, Some(AMPLE), 0, 1).unwrap();
    // The heartbeat's thread, which the child lacks, does not have the lock at the fork.
    let values = store.values.lock();
    // SAFETY: the child has one thread, which exits after it has dropped its copy of the world.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: this has no requirements. It ends a child that waits, as for the lock.
        unsafe { libc::alarm(20) };
        drop(world);
        let has_ended = values["alive/0"] == b"ended";
        // SAFETY: this has no requirements.
        unsafe { libc::_exit(i32::from(has_ended)) }
    }
    drop(values);
    let mut status = 0;
    // SAFETY: a child of this process that was not waited for.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child has ended the heartbeat of its parent");
    drop(world);
    assert_eq!(store.values.lock()["alive/0"], b"ended");
}
