//! The transport between ranks that are processes, after they have [joined](super::join): every
//! rank has one connection to rank 0. If it closes before the rank has finished, or nothing comes
//! over it until the deadline, the rank counts as lost, and rank 0 tells the others.

use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};

use super::Transport;
use super::heartbeat::{self, Silence};
use super::hub::{ExchangeState, Hub, Outcome};
use super::subset::Subset;
use super::survivors::{Joined, Members};
use super::wire::{
    self, Kind, LostRank, MAX_FRAME, bad, contribution_header, pack, parse, read_contribution,
    receive, send_all, unpack,
};
use crate::communicator::peers::{Cancelled, Gathered, NEVER};
use crate::device::{Health, recorder};
use crate::error::Result;
use crate::machine::{Machine, Shared};

/// A peer that reads nothing for this long counts as dead.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a rank that closes its connection waits for its peer to have read everything.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval of the three TCP keepalive probes, which detect a host that went down.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Sets a connection's options after the rank has joined.
fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    stream.set_nodelay(true)?;
    let keepalive =
        TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE).with_retries(3);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

fn closed(error: &io::Error) -> String {
    format!("its connection closed ({error}): its process or its host may have gone down")
}

/// Waits, at most [`CLOSE_TIMEOUT`], until the reader threads, which have references to `shared`
/// too, have ended. If a socket is closed with unread data, TCP resets the connection, and its peer
/// may lose messages, such as why a rank is lost.
fn wait_for_readers<T>(shared: &Arc<T>) {
    let start = Instant::now();
    while Arc::strong_count(shared) > 1 && start.elapsed() < CLOSE_TIMEOUT {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The state of rank 0: the hub, and the connections to the other ranks.
struct Root {
    hub: Hub,
    /// The connection of rank `i` has index `i - 1`.
    writers: Vec<Mutex<TcpStream>>,
    /// The silence of rank `i` has index `i - 1`.
    silences: Vec<Silence>,
    /// Whether a lost rank was reported to the other ranks.
    announced: Mutex<bool>,
    members: Members,
}

impl Root {
    fn n_ranks(&self) -> usize {
        1 + self.writers.len()
    }

    /// Sends a frame to one other rank.
    fn send_to(&self, rank: usize, kind: Kind, payload: &[&[u8]]) {
        let mut writer = self.writers[rank - 1].lock();
        if send_all(&mut *writer, kind, payload).is_err() {
            // The thread that reads the connection then finds it closed, and reports the rank.
            let _ = writer.shutdown(Shutdown::Both);
        }
    }

    fn send_to_all(&self, kind: Kind, payload: &[u8]) {
        (1..self.n_ranks()).for_each(|rank| self.send_to(rank, kind, &[payload]));
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
                for (&member, request) in subset.members().iter().zip(&complete.requests) {
                    if member > 0 {
                        self.send_to(member, Kind::Gathered, &[&request.to_le_bytes(), &payload]);
                    }
                }
                self.hub.publish(complete);
                outcome
            }
            ExchangeState::Pending(outcome) => outcome,
            ExchangeState::Failed(rank, why) => {
                self.mark_lost(rank, why);
                Outcome::default()
            }
        }
    }

    /// Handles a contribution from another rank.
    fn handle_contribution(&self, rank: usize, payload: &[u8]) -> io::Result<()> {
        let part = read_contribution(payload)?;
        let subset = Arc::new(Subset::from_key(part.subset, self.n_ranks())?);
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

    /// For a rank that others wait for: all processes print what their ranks do.
    fn mark_absent(&self, rank: usize, why: String) {
        self.announce(&LostRank { rank, why, absent: true });
    }

    fn announce(&self, lost: &LostRank) {
        // Locked until this returns, so that all ranks are told the same lost rank.
        let mut announced = self.announced.lock();
        if !*announced {
            *announced = true;
            self.send_to_all(Kind::Lost, &serde_json::to_vec(lost).unwrap_or_default());
        }
        match lost.absent {
            true => self.hub.mark_absent(lost.rank, &lost.why),
            false => self.hub.mark_lost(lost.rank, &lost.why),
        }
    }

    /// Tells the other ranks that this one runs, and finds those that no longer do, or that others
    /// have waited for too long. Whether to go on.
    fn beat(&self) -> bool {
        self.send_to_all(Kind::Alive, &[]);
        let deadline = self.hub.health().deadline();
        for (rank, silence) in (1..).zip(&self.silences) {
            if let Some(why) = silence.grow(deadline) {
                self.mark_absent(rank, why);
            }
        }
        self.hub.beat(heartbeat::interval(deadline));
        if let Some((rank, why)) = self.hub.absent() {
            self.mark_absent(rank, why);
        }
        !self.hub.is_finished() && !self.hub.health().is_lost()
    }

    /// Handles the frames of one rank until its connection ends.
    fn serve(&self, rank: usize, mut stream: TcpStream) {
        self.read_frames(rank, &mut stream);
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn read_frames(&self, rank: usize, stream: &mut TcpStream) {
        loop {
            let received = receive(stream, MAX_FRAME);
            self.silences[rank - 1].end();
            match received {
                Ok((Kind::Alive, _)) => {}
                Ok((Kind::Contribute, payload)) => {
                    if let Err(error) = self.handle_contribution(rank, &payload) {
                        return self.mark_lost(rank, &format!("it sent {error}"));
                    }
                }
                Ok((Kind::Withdraw, payload)) => {
                    if let Err(error) = self.handle_withdrawal(rank, &payload) {
                        return self.mark_lost(rank, &format!("it sent {error}"));
                    }
                }
                Ok((Kind::Finished, _)) => self.mark_finished(rank),
                Ok((Kind::Failed, why)) => {
                    return self.mark_lost(rank, &String::from_utf8_lossy(&why));
                }
                Ok((Kind::Lost, payload)) => match parse::<LostRank>(&payload) {
                    Ok(lost) => return self.mark_lost(0, &lost.why),
                    Err(error) => return self.mark_lost(rank, &format!("it sent {error}")),
                },
                Ok((kind, _)) => {
                    return self.mark_lost(rank, &format!("it sent an unexpected {kind:?} frame"));
                }
                Err(_) if self.hub.is_finished() => return,
                Err(error) => return self.mark_lost(rank, &closed(&error)),
            }
        }
    }
}

/// The transport of rank 0.
pub(super) struct TcpRoot(Arc<Root>);

impl TcpRoot {
    /// `streams` are the connections of ranks 1, 2, ..., which have joined.
    pub(super) fn start(streams: Vec<TcpStream>, members: Members) -> io::Result<Self> {
        let deadline = members.config.deadline;
        streams.iter().try_for_each(configure)?;
        let readers: Vec<TcpStream> =
            streams.iter().map(TcpStream::try_clone).collect::<Result<_, _>>()?;
        let hub = Hub::new(Machine::Gpus, 1 + streams.len(), deadline);
        let silences = streams.iter().map(|_| Silence::default()).collect();
        let writers = streams.into_iter().map(Mutex::new).collect();
        let announced = Mutex::new(false);
        let root = Arc::new(Root { hub, writers, silences, announced, members });
        for (index, stream) in readers.into_iter().enumerate() {
            let (root, rank) = (Arc::clone(&root), index + 1);
            std::thread::Builder::new()
                .name(format!("devcomm-rank-{rank}"))
                .spawn(move || root.serve(rank, stream))?;
        }
        let weak = Arc::downgrade(&root);
        heartbeat::start(0, deadline, move || weak.upgrade().is_some_and(|root| root.beat()))?;
        Ok(Self(root))
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

    fn join_survivors(&self, lost: usize) -> Result<Joined> {
        self.0.members.join_survivors(lost)
    }
}

impl Drop for TcpRoot {
    fn drop(&mut self) {
        // From here on, ranks that close their connections are not reported as lost.
        *self.0.announced.lock() = true;
        for writer in &self.0.writers {
            let _ = writer.lock().shutdown(Shutdown::Write);
        }
        wait_for_readers(&self.0);
        for writer in &self.0.writers {
            let _ = writer.lock().shutdown(Shutdown::Both);
        }
    }
}

/// The state of a rank other than 0.
struct Client {
    state: Shared<ClientState>,
    health: Arc<Health>,
    writer: Mutex<TcpStream>,
    /// The silence of rank 0.
    silence: Silence,
    /// The request number of the next exchange.
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

    fn read_frames(&self, mut stream: TcpStream) {
        loop {
            let received = receive(&mut stream, MAX_FRAME);
            self.silence.end();
            let handled = received.and_then(|(kind, payload)| match kind {
                Kind::Alive => Ok(()),
                Kind::Gathered => self.handle_gathered(&payload),
                Kind::Finished => {
                    self.state.change(|state| state.finished = true);
                    Ok(())
                }
                Kind::Lost => {
                    let lost: LostRank = parse(&payload)?;
                    if lost.absent {
                        recorder::print_all();
                    }
                    self.mark_lost(lost.rank, &lost.why);
                    Ok(())
                }
                other => Err(bad(format!("an unexpected {other:?} frame"))),
            });
            if let Err(error) = handled {
                if !self.state.lock().finished {
                    self.mark_lost(0, &closed(&error));
                }
                let _ = stream.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    fn send(&self, kind: Kind, payload: &[&[u8]]) {
        let mut writer = self.writer.lock();
        if send_all(&mut *writer, kind, payload).is_err() {
            // The reader thread continues: rank 0 may have sent the reason before it closed.
            let _ = writer.shutdown(Shutdown::Write);
        }
    }

    /// Tells rank 0 that this rank runs. Whether to go on.
    fn beat(&self) -> bool {
        self.send(Kind::Alive, &[]);
        if let Some(why) = self.silence.grow(self.health.deadline()) {
            recorder::print_all();
            // For the case that it goes on later.
            let lost = LostRank { rank: 0, why: why.clone(), absent: true };
            self.send(Kind::Lost, &[&serde_json::to_vec(&lost).unwrap_or_default()]);
            self.mark_lost(0, &why);
        }
        !self.state.lock().finished && !self.health.is_lost()
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

/// The transport of a rank other than 0.
pub(super) struct TcpClient(Arc<Client>);

impl TcpClient {
    /// `stream` is the connection to rank 0, after joining.
    pub(super) fn start(stream: TcpStream, members: Members) -> io::Result<Self> {
        let (rank, deadline) = (members.config.rank, members.config.deadline);
        configure(&stream)?;
        let reader = stream.try_clone()?;
        let client = Arc::new(Client {
            state: Shared::new(Machine::Gpus, ClientState::default()),
            health: Health::new(Machine::Gpus, deadline),
            writer: Mutex::new(stream),
            silence: Silence::default(),
            next: AtomicU64::new(0),
            members,
        });
        let shared = Arc::clone(&client);
        std::thread::Builder::new()
            .name(format!("devcomm-rank-{rank}"))
            .spawn(move || shared.read_frames(reader))?;
        let weak = Arc::downgrade(&client);
        heartbeat::start(rank, deadline, move || weak.upgrade().is_some_and(|this| this.beat()))?;
        Ok(Self(client))
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

    fn join_survivors(&self, lost: usize) -> Result<Joined> {
        self.0.members.join_survivors(lost)
    }
}

impl Drop for TcpClient {
    fn drop(&mut self) {
        let _ = self.0.writer.lock().shutdown(Shutdown::Write);
        wait_for_readers(&self.0);
        let _ = self.0.writer.lock().shutdown(Shutdown::Both);
    }
}
