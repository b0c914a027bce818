//! The transport between ranks that are processes, after they have [joined](super::join): every
//! rank has one connection to rank 0. If it closes before the rank has finished, or nothing comes
//! over it until the deadline, the rank counts as lost, and rank 0 tells the others.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};

use super::Transport;
use super::connection::Connection;
use super::heartbeat::{self, Silence};
use super::hub::{ExchangeState, Hub, Outcome};
use super::service::{Links, Service, ServiceThread};
use super::subset::Subset;
use super::survivors::{JoinedWorld, Members};
use super::wire::{
    self, Kind, LostRank, bad, contribution_header, json, max_contribution, pack, parse,
    read_contribution, unpack,
};
use crate::communicator::peers::{Cancelled, Gathered, NEVER};
use crate::device::{Health, recorder};
use crate::error::Result;
use crate::machine::{Machine, Shared};

/// How long a connection is idle before TCP probes it, and the time between the three probes, which
/// detect a host that went down.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Returns the connections to ranks that have joined.
fn links(connections: Vec<Connection>) -> io::Result<Links> {
    let keepalive =
        TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE).with_retries(3);
    let configure =
        |connection: &Connection| SockRef::from(connection.stream()).set_tcp_keepalive(&keepalive);
    connections.iter().try_for_each(configure)?;
    Links::new(connections)
}

fn closed(error: &io::Error) -> String {
    format!("its connection closed ({error}): its process or its host may have gone down")
}

/// The state of rank 0: the hub, and the connections to the other ranks.
struct Root {
    hub: Hub,
    /// The connection of rank `i` has index `i - 1`.
    links: Links,
    /// The silence of rank `i` has index `i - 1`.
    silences: Vec<Silence>,
    /// Whether a lost rank was reported to the other ranks.
    announced: Mutex<bool>,
    members: Members,
}

impl Root {
    fn n_ranks(&self) -> usize {
        1 + self.links.len()
    }

    fn send_to_all(&self, kind: Kind, payload: &[u8]) {
        (0..self.links.len()).for_each(|index| self.links.send(index, kind, &[payload]));
    }

    // The functions below send to the other ranks before they wake rank 0's thread, which may then
    // end and close the connections.

    /// Adds a contribution. Returns where the result will be.
    fn contribute(
        &self,
        rank: usize,
        subset: &Arc<Subset>,
        request: u64,
        bytes: Vec<u8>,
    ) -> Outcome {
        match self.hub.contribute(rank, subset, request, bytes) {
            ExchangeState::Complete(complete) => {
                let (payload, outcome) = (pack(&complete.all), complete.outcome.clone());
                let mut beaten = Instant::now();
                for (&member, request) in subset.members().iter().zip(&complete.requests) {
                    // Rank 0 gets the result by `publish`.
                    if member > 0 {
                        let payload = [&request.to_le_bytes(), payload.as_slice()];
                        self.links.send(member - 1, Kind::Gathered, &payload);
                    }
                    // To authenticate large results for many ranks takes longer than this process
                    // may be silent, and this may be the thread that says that it runs.
                    if beaten.elapsed() >= self.interval() {
                        beaten = Instant::now();
                        self.send_to_all(Kind::Alive, &[]);
                    }
                }
                self.hub.publish(complete);
                outcome
            }
            ExchangeState::Pending(outcome) => outcome,
            ExchangeState::Failed(rank, why) => {
                // Ends the waits for the outcome, which never comes.
                self.mark_lost(rank, why);
                Outcome::default()
            }
        }
    }

    /// Handles a contribution from another rank.
    fn handle_contribution(&self, rank: usize, payload: &[u8]) -> io::Result<()> {
        let part = read_contribution(payload)?;
        let subset = Arc::new(Subset::from_key(part.subset, self.n_ranks())?);
        if part.bytes.len() > max_contribution(subset.members().len()) {
            return Err(bad(format!("{} bytes in an exchange", part.bytes.len())));
        }
        self.contribute(rank, &subset, part.request, part.bytes);
        Ok(())
    }

    fn handle_withdrawal(&self, rank: usize, payload: &[u8]) -> io::Result<()> {
        let subset = Subset::from_key(read_contribution(payload)?.subset, self.n_ranks())?;
        self.hub.withdraw(rank, &subset);
        Ok(())
    }

    fn mark_finished(&self, rank: usize) {
        match self.hub.mark_finished(rank) {
            Ok(true) => {
                self.send_to_all(Kind::Finished, &[]);
                self.hub.release();
            }
            Ok(false) => {}
            Err(why) => self.mark_lost(rank, why),
        }
    }

    fn mark_lost(&self, rank: usize, why: &str) {
        self.announce(&LostRank { rank, why: why.to_owned(), absent: false });
    }

    /// Marks a rank that others wait for: all processes print what their ranks do.
    fn mark_absent(&self, rank: usize, why: String) {
        self.announce(&LostRank { rank, why, absent: true });
    }

    fn announce(&self, lost: &LostRank) {
        // Locked until this returns, so that all ranks are told the same lost rank.
        let mut announced = self.announced.lock();
        if !*announced {
            *announced = true;
            self.send_to_all(Kind::Lost, &json(lost));
        }
        match lost.absent {
            true => self.hub.mark_absent(lost.rank, &lost.why),
            false => self.hub.mark_lost(lost.rank, &lost.why),
        }
    }

    /// Handles a frame of a rank, or the end of its connection. Fails with the reason why the rank
    /// counts as lost.
    fn handle_frame(
        &self,
        rank: usize,
        received: io::Result<(Kind, Vec<u8>)>,
    ) -> Result<(), String> {
        let sent = |error| format!("it sent {error}");
        let (kind, payload) = received.map_err(|error| closed(&error))?;
        match kind {
            Kind::Alive => {}
            Kind::Contribute => self.handle_contribution(rank, &payload).map_err(sent)?,
            Kind::Withdraw => self.handle_withdrawal(rank, &payload).map_err(sent)?,
            Kind::Finished => self.mark_finished(rank),
            Kind::Failed => return Err(String::from_utf8_lossy(&payload).into_owned()),
            Kind::Lost => {
                let lost: LostRank = parse(&payload).map_err(sent)?;
                self.mark_lost(0, &lost.why);
            }
            other => return Err(format!("it sent an unexpected {other:?} frame")),
        }
        Ok(())
    }
}

impl Service for Root {
    fn links(&self) -> &Links {
        &self.links
    }

    fn heard(&self, index: usize) {
        self.silences[index].end();
    }

    fn handle(&self, index: usize, received: io::Result<(Kind, Vec<u8>)>) -> bool {
        if received.is_err() && self.hub.is_finished() {
            return false;
        }
        let taken = self.handle_frame(index + 1, received);
        if let Err(why) = &taken {
            self.mark_lost(index + 1, why);
        }
        taken.is_ok()
    }

    /// Tells the ranks that this process runs, and finds ranks that others have waited for too
    /// long.
    fn beat(&self) -> bool {
        self.send_to_all(Kind::Alive, &[]);
        let deadline = self.hub.health().deadline();
        for (rank, silence) in (1..).zip(&self.silences) {
            if let Some(why) = silence.grow(deadline) {
                self.mark_absent(rank, why);
            }
        }
        self.hub.beat(self.interval());
        if let Some((rank, why)) = self.hub.absent() {
            self.mark_absent(rank, why);
        }
        !self.hub.is_finished() && !self.hub.health().is_lost()
    }

    fn interval(&self) -> Duration {
        heartbeat::interval(self.hub.health().deadline())
    }
}

/// The transport of rank 0.
pub(super) struct TcpRoot(ServiceThread<Root>);

impl TcpRoot {
    /// Starts the transport of rank 0; `connections` are those of ranks 1, 2, ..., which have
    /// joined.
    pub(super) fn start(connections: Vec<Connection>, members: Members) -> io::Result<Self> {
        let hub = Hub::new(Machine::Gpus, 1 + connections.len(), members.config.deadline);
        let silences = connections.iter().map(|_| Silence::default()).collect();
        let (links, announced) = (links(connections)?, Mutex::new(false));
        let root = Root { hub, links, silences, announced, members };
        ServiceThread::start(0, root).map(Self)
    }
}

impl Transport for TcpRoot {
    fn all_gather(
        &self,
        subset: &Arc<Subset>,
        bytes: &[u8],
        cancelled: Cancelled<'_>,
    ) -> Result<Gathered> {
        self.0.hub.health().check()?;
        let outcome = self.0.contribute(0, subset, 0, bytes.to_vec());
        self.0.hub.wait_for(&outcome, None, cancelled).inspect_err(|_| {
            self.0.hub.withdraw(0, subset);
        })
    }

    fn finish(&self) -> Result<()> {
        self.0.mark_finished(0);
        self.0.hub.wait_for_all()
    }

    fn fail(&self, why: &str) {
        self.0.mark_lost(0, why);
    }

    fn health(&self) -> &Arc<Health> {
        self.0.hub.health()
    }

    fn join_survivors(&self, lost: usize) -> Result<JoinedWorld> {
        self.0.members.join_survivors(lost)
    }
}

impl Drop for TcpRoot {
    fn drop(&mut self) {
        // From here on, ranks that close their connections are not reported as lost.
        *self.0.announced.lock() = true;
    }
}

/// The state of a rank other than 0.
struct Client {
    state: Shared<ClientState>,
    health: Arc<Health>,
    /// The connection to rank 0.
    links: Links,
    /// The silence of rank 0.
    silence: Silence,
    /// The request number of the next exchange. Nothing depends on the order of these numbers.
    next: AtomicU64,
    members: Members,
}

#[derive(Default)]
struct ClientState {
    /// This rank's exchanges by request number: the number of ranks, and the result once it has
    /// arrived.
    exchanges: HashMap<u64, (usize, Option<Gathered>)>,
    finished: bool,
}

impl Client {
    fn mark_lost(&self, rank: usize, why: &str) {
        self.state.change(|_| self.health.mark_lost(rank, why));
    }

    fn handle_gathered(&self, payload: &[u8]) -> io::Result<()> {
        let (request, parts) = wire::request(payload)?;
        let parts = unpack(parts)?;
        self.state.change(|state| match state.exchanges.get_mut(&request) {
            Some((n_ranks, result @ None)) if *n_ranks == parts.len() => {
                *result = Some(Arc::new(parts));
                Ok(())
            }
            _ => Err(bad("the result of an unknown exchange")),
        })
    }

    fn send(&self, kind: Kind, payload: &[&[u8]]) {
        self.links.send(0, kind, payload);
    }

    /// Waits until `ready` returns a value, a rank is lost, or `cancelled` fails.
    fn wait<T>(
        &self,
        cancelled: Cancelled<'_>,
        mut ready: impl FnMut(&mut ClientState) -> Option<T>,
    ) -> Result<T> {
        self.state.watch(None, |state| match ready(state) {
            None => self.health.check().and_then(|()| cancelled()).map(|()| None),
            found => Ok(found),
        })
    }
}

impl Service for Client {
    fn links(&self) -> &Links {
        &self.links
    }

    fn heard(&self, _: usize) {
        self.silence.end();
    }

    fn handle(&self, _: usize, received: io::Result<(Kind, Vec<u8>)>) -> bool {
        let handled = received.and_then(|(kind, payload)| {
            match kind {
                Kind::Alive => {}
                Kind::Gathered => self.handle_gathered(&payload)?,
                Kind::Finished => self.state.change(|state| state.finished = true),
                Kind::Lost => {
                    let lost: LostRank = parse(&payload)?;
                    if lost.absent {
                        recorder::print_all();
                    }
                    self.mark_lost(lost.rank, &lost.why);
                }
                other => return Err(bad(format!("an unexpected {other:?} frame"))),
            }
            Ok(())
        });
        if let Err(error) = &handled
            && !self.state.lock().finished
        {
            self.mark_lost(0, &closed(error));
        }
        handled.is_ok()
    }

    fn beat(&self) -> bool {
        self.send(Kind::Alive, &[]);
        if let Some(why) = self.silence.grow(self.health.deadline()) {
            recorder::print_all();
            // Rank 0 reads this if it goes on later.
            let lost = LostRank { rank: 0, why: why.clone(), absent: true };
            self.send(Kind::Lost, &[&json(&lost)]);
            self.mark_lost(0, &why);
        }
        !self.state.lock().finished && !self.health.is_lost()
    }

    fn interval(&self) -> Duration {
        heartbeat::interval(self.health.deadline())
    }
}

/// The transport of a rank other than 0.
pub(super) struct TcpClient(ServiceThread<Client>);

impl TcpClient {
    /// Starts the transport of a rank that has joined; `connection` is the one to rank 0.
    pub(super) fn start(connection: Connection, members: Members) -> io::Result<Self> {
        let (rank, deadline) = (members.config.rank, members.config.deadline);
        let client = Client {
            state: Shared::new(Machine::Gpus, ClientState::default()),
            health: Health::new(Machine::Gpus, deadline),
            links: links(vec![connection])?,
            silence: Silence::default(),
            next: AtomicU64::new(0),
            members,
        };
        ServiceThread::start(rank, client).map(Self)
    }
}

impl Transport for TcpClient {
    fn all_gather(
        &self,
        subset: &Arc<Subset>,
        bytes: &[u8],
        cancelled: Cancelled<'_>,
    ) -> Result<Gathered> {
        self.0.health.check()?;
        let request = self.0.next.fetch_add(1, Ordering::Relaxed);
        self.0.state.lock().exchanges.insert(request, (subset.members().len(), None));
        let header = contribution_header(request, subset.key());
        self.0.send(Kind::Contribute, &[&header, bytes]);
        let waited = self.0.wait(cancelled, |state| {
            let result = state.exchanges.get(&request)?.1.clone()?;
            state.exchanges.remove(&request);
            Some(result)
        });
        // The entry stays: the result may be on its way.
        waited.inspect_err(|_| self.0.send(Kind::Withdraw, &[&header]))
    }

    fn finish(&self) -> Result<()> {
        self.0.send(Kind::Finished, &[]);
        self.0.wait(NEVER, |state| state.finished.then_some(()))?;
        self.0.health.check()
    }

    fn fail(&self, why: &str) {
        self.0.send(Kind::Failed, &[why.as_bytes()]);
        self.0.mark_lost(self.0.members.config.rank, why);
    }

    fn health(&self) -> &Arc<Health> {
        &self.0.health
    }

    fn join_survivors(&self, lost: usize) -> Result<JoinedWorld> {
        self.0.members.join_survivors(lost)
    }
}
