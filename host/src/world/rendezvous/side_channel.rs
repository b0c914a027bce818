//! Communicators of other libraries whose ranks compare their calls, and notice that one of them is
//! lost, over a channel that the caller passes.

use std::collections::HashMap;
use std::ffi::c_void;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::heartbeat::{LIMIT, Silence, interval};
use super::hub::absence;
use super::subset::Subset;
use super::survivors::JoinedWorld;
use super::wire::{LostRank, json, parse};
use super::{Rendezvous, Transport, host_name};
use crate::communicator::peers::{
    Cancelled, Gathered, NEVER, Peers, call_of, contribution, same_call,
};
use crate::communicator::{Communicator, Library};
use crate::device::{Context, Health};
use crate::error::{Error, Result, StateError, WorldError};
use crate::machine::{Shared, Wakes};
use crate::sys::fork::Process;

/// How long a call of a channel waits for a value.
const GET: Duration = Duration::from_millis(20);
/// The key of the [`LostRank`] that all ranks report.
const LOST: &str = "lost";
/// The heartbeat of a rank whose communicator has ended.
const ENDED: &[u8] = b"ended";

/// A store of keys and values that the ranks of one communicator share, such as PyTorch's `Store`:
/// for several communicators, `PrefixStore`s with different prefixes.
///
/// Calls come from several threads. An error counts as the end of the channel.
pub trait SideChannel: Send + Sync {
    /// Stores a value, in place of an earlier one of this key.
    ///
    /// # Errors
    ///
    /// If the store cannot be reached.
    fn set(&self, key: &str, value: &[u8]) -> io::Result<()>;

    /// Returns the value of a key; `None` if it has none after `timeout`, which may be 0.
    ///
    /// # Errors
    ///
    /// If the store cannot be reached.
    fn get(&self, key: &str, timeout: Duration) -> io::Result<Option<Vec<u8>>>;

    /// Deletes a key that no rank will ask for again. A store that ignores this keeps the values of
    /// every call.
    ///
    /// # Errors
    ///
    /// If the store cannot be reached.
    fn remove(&self, key: &str) -> io::Result<()> {
        let _ = key;
        Ok(())
    }

    /// Returns the time for which a rank may set nothing, unless the deadline is shorter. It is
    /// 20 s: a thread sets a heartbeat each second, however busy the rank is. A channel whose calls
    /// wait for more than the store, such as for the lock of an interpreter, returns a longer time.
    fn longest_silence(&self) -> Duration {
        LIMIT
    }
}

impl Communicator {
    /// Does the same as [`from_raw`](Self::from_raw), with a channel between the ranks, which all
    /// call this. *Collective*. As in a [`World`](crate::World), they then know each other's window
    /// lengths, compare the requirements of device communicators, and get
    /// [`WorldError::RankLost`](crate::WorldError::RankLost) in waits of this context when a rank
    /// does not come to a call that others wait in until the deadline, or, once it has joined, says
    /// nothing over the channel for as long, or for the channel's
    /// [`longest_silence`](SideChannel::longest_silence). With `None` they wait forever. Operations
    /// of the communicator that run at a loss are not aborted, as the other library owns it.
    ///
    /// [`Rank::communicator_from_raw`](crate::Rank::communicator_from_raw) uses the connections of
    /// a world instead.
    ///
    /// # Safety
    ///
    /// The contract is that of [`from_raw`](Self::from_raw).
    ///
    /// # Errors
    ///
    /// The errors are those of [`from_raw`](Self::from_raw);
    /// [`WorldError::RankLost`](crate::WorldError::RankLost);
    /// [`WorldError::Rendezvous`](crate::WorldError::Rendezvous) if the channel fails.
    pub unsafe fn from_raw_with(
        library: &Library,
        context: &Context,
        raw: *mut c_void,
        channel: Arc<dyn SideChannel>,
        deadline: Option<Duration>,
    ) -> Result<Self> {
        let peers = |rank, n_ranks| match n_ranks {
            1 => Ok(None),
            _ => join(channel, context.health(), deadline, rank, n_ranks).map(Some),
        };
        // SAFETY: the caller passes a communicator of NCCL's that outlives this one.
        unsafe { Self::adopt_raw(library, context, raw, peers) }
    }
}

/// Joins the ranks of a communicator over a channel.
pub(super) fn join(
    channel: Arc<dyn SideChannel>,
    health: Arc<Health>,
    deadline: Option<Duration>,
    rank: usize,
    n_ranks: usize,
) -> Result<Arc<dyn Peers>> {
    let stopped = Shared::new(health.machine().clone(), false);
    let rounds = Mutex::default();
    let process = Process::current();
    let member = Member { channel, health, deadline, rank, n_ranks, rounds, stopped, process };
    let member = Arc::new(member);
    let beating = Arc::clone(&member);
    let machine = member.health.machine();
    machine.spawn("devcomm-heart", move || {
        beating.beat_until_stopped();
        Ok(())
    })?;
    let transport = Arc::new(ChannelTransport(member));
    let world = Arc::new(Subset::world(n_ranks));
    let own = contribution("from_raw_with", host_name().as_bytes());
    let hosts = same_call(&transport.all_gather(&world, &own, NEVER)?)?;
    let hosts = hosts.iter().map(|host| String::from_utf8_lossy(host).into_owned()).collect();
    Ok(Arc::new(Rendezvous::new(JoinedWorld { rank, hosts, transport })))
}

/// One rank, and the channel to the others.
struct Member {
    channel: Arc<dyn SideChannel>,
    health: Arc<Health>,
    deadline: Option<Duration>,
    rank: usize,
    n_ranks: usize,
    /// The number of exchanges of each set of ranks, by name.
    rounds: Mutex<HashMap<String, u64>>,
    /// Whether the heartbeat is to end, because this rank's communicator has.
    stopped: Shared<bool>,
    /// The process that joined, whose children have its channel, too.
    process: Process,
}

/// Returns the key of a rank's heartbeat, whose values differ: a number that grows, or [`ENDED`].
fn heartbeat_of(rank: usize) -> String {
    format!("alive/{rank}")
}

fn failed(error: io::Error) -> Error {
    let (address, why) = ("the side channel".to_owned(), error.to_string());
    WorldError::Rendezvous { address, why }.into()
}

impl Member {
    fn set(&self, key: &str, value: &[u8]) -> io::Result<()> {
        let set = self.channel.set(key, value);
        self.health.machine().notify();
        set
    }

    /// Returns the value of a key that may have none yet.
    fn peek(&self, key: &str) -> io::Result<Option<Vec<u8>>> {
        self.channel.get(key, Duration::ZERO)
    }

    /// Returns the rank that was announced as lost.
    fn announced(&self) -> io::Result<Option<LostRank>> {
        Ok(self.peek(LOST)?.and_then(|lost| parse(&lost).ok()))
    }

    /// Tells the others that a rank is lost, unless one is already.
    fn announce(&self, rank: usize, why: String) {
        let lost = match self.announced() {
            Ok(Some(lost)) => lost,
            _ => {
                let lost = LostRank { rank, why, absent: false };
                // If this fails, the others find out themselves.
                let _ = self.set(LOST, &json(&lost));
                lost
            }
        };
        self.health.mark_lost(lost.rank, &lost.why);
    }

    /// Says at intervals that this rank runs, until it is stopped or a rank is lost. After a stop
    /// the last value is [`ENDED`], also if the end came while a number was set.
    fn beat_until_stopped(&self) {
        let (mut silence, mut last) = (Silence::default(), None);
        // The ranks watch each other in a ring: this is the one that this rank watches.
        let mut watched = (self.rank + 1) % self.n_ranks;
        for beat in 0_u64.. {
            if let Err(error) = self.beat(beat, &mut watched, &mut last, &mut silence) {
                self.health.mark_lost(self.rank, &format!("its side channel failed: {error}"));
            }
            if self.health.is_lost() {
                return;
            }
            let stopped = self
                .stopped
                .wait(Some(interval(self.deadline)), |stopped| Ok(stopped.then_some(())));
            if !matches!(stopped, Err(Error::State(StateError::DeadlinePassed { .. }))) {
                return self.set_ended();
            }
        }
    }

    fn set_ended(&self) {
        // If this fails, the others find this rank silent.
        let _ = self.set(&heartbeat_of(self.rank), ENDED);
    }

    /// Sets this rank's heartbeat, and looks whether that of the `watched` rank has changed from
    /// `last`.
    fn beat(
        &self,
        beat: u64,
        watched: &mut usize,
        last: &mut Option<Vec<u8>>,
        silence: &mut Silence,
    ) -> io::Result<()> {
        self.set(&heartbeat_of(self.rank), &beat.to_le_bytes())?;
        if let Some(lost) = self.announced()? {
            self.health.mark_lost(lost.rank, &lost.why);
            return Ok(());
        }
        let heard = self.peek(&heartbeat_of(*watched))?;
        if *watched == self.rank {
            // The communicators of all others have ended.
            return Ok(());
        }
        if heard.as_deref() == Some(ENDED) {
            *watched = (*watched + 1) % self.n_ranks;
            silence.end();
        } else if heard.is_none() || heard != *last {
            // A rank that has not joined yet is no silent one: exchanges wait until the deadline.
            *last = heard;
            silence.end();
        } else if let Some(why) = silence.grow_to(self.channel.longest_silence(), self.deadline) {
            self.announce(*watched, why);
        }
        Ok(())
    }

    /// Waits for what another rank contributes to an exchange.
    fn wait(
        &self,
        key: &str,
        from: usize,
        limit: Option<Duration>,
        cancelled: Cancelled<'_>,
    ) -> Result<Vec<u8>> {
        let machine = self.health.machine();
        // A wait in the store would stop all simulated ranks, since they run one at a time.
        let get = if machine.is_simulated() { Duration::ZERO } else { GET };
        let mut found = None;
        machine.poll(Wakes::Notified, limit, || {
            found = self.channel.get(key, get).map_err(failed)?;
            if found.is_none() {
                self.health.check()?;
                cancelled()?;
                self.announce_if_ended(key, from).map_err(failed)?;
            }
            Ok(found.is_some())
        })?;
        // `poll` succeeds only after it was found.
        Ok(found.unwrap_or_default())
    }

    /// Announces a rank as lost if it has ended without contributing.
    fn announce_if_ended(&self, key: &str, from: usize) -> io::Result<()> {
        let ended = self.peek(&heartbeat_of(from))?.as_deref() == Some(ENDED);
        if ended && self.peek(key)?.is_none() {
            self.announce(from, "its communicator had ended when others waited for it".to_owned());
        }
        Ok(())
    }
}

/// Exchanges over a channel. A rank's contribution is the value of a key, which consists of the set
/// of ranks, the number of the exchange and the rank.
struct ChannelTransport(Arc<Member>);

impl Transport for ChannelTransport {
    fn all_gather(
        &self,
        subset: &Arc<Subset>,
        bytes: &[u8],
        cancelled: Cancelled<'_>,
    ) -> Result<Gathered> {
        let Member { channel, health, deadline, rank, rounds, .. } = &*self.0;
        health.check()?;
        let words = subset.key().iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        let name: String = Sha256::digest(words)[..16].iter().map(|b| format!("{b:02x}")).collect();
        let round = rounds.lock().get(&name).copied().unwrap_or(0);
        let key = |round: u64, rank: usize| format!("{name}/{round}/{rank}");
        self.0.set(&key(round, *rank), bytes).map_err(failed)?;
        let (machine, mut parts) = (health.machine(), Vec::new());
        let start = machine.now();
        for &member in subset.members() {
            let waited = machine.now().saturating_sub(start);
            let limit = deadline.map(|deadline| deadline.saturating_sub(waited));
            match self.0.wait(&key(round, member), member, limit, cancelled) {
                Ok(part) => parts.push(part),
                Err(Error::State(StateError::DeadlinePassed { .. })) => {
                    let here =
                        |member: &usize| matches!(self.0.peek(&key(round, *member)), Ok(Some(_)));
                    let (here, absent): (Vec<usize>, Vec<usize>) =
                        subset.members().iter().partition(|member| here(member));
                    let waited = machine.now().saturating_sub(start);
                    let (lost, why) = match absent.contains(rank) {
                        true => (*rank, "its side channel keeps nothing".to_owned()),
                        false => {
                            // `member` may have come after its wait.
                            let lost = absent.first().copied().unwrap_or(member);
                            (lost, absence(waited, call_of(bytes), &here, &absent))
                        }
                    };
                    self.0.announce(lost, why);
                    // Fails, since a rank is lost now.
                    health.check()?;
                }
                Err(error) => {
                    // This fails too if the channel has failed, as the error says.
                    let _ = channel.remove(&key(round, *rank));
                    return Err(error);
                }
            }
        }
        rounds.lock().insert(name.clone(), round + 1);
        // All ranks have come to this exchange, so they have completed the one before.
        if round > 0 {
            channel.remove(&key(round - 1, *rank)).map_err(failed)?;
        }
        Ok(Arc::new(parts))
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }

    fn fail(&self, why: &str) {
        self.0.announce(self.0.rank, why.to_owned());
    }

    fn health(&self) -> &Arc<Health> {
        &self.0.health
    }

    fn join_survivors(&self, _lost: usize) -> Result<JoinedWorld> {
        Err(Error::invalid("only the ranks of a world can go on after a loss"))
    }
}

impl Drop for ChannelTransport {
    fn drop(&mut self) {
        if self.0.process.is_current() {
            self.0.stopped.change(|stopped| *stopped = true);
            self.0.set_ended();
        }
    }
}
