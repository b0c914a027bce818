//! The rendezvous of ranks that are processes, once they have [joined](super::join): every rank keeps one connection to
//! rank 0. One that closes before its rank has finished is a dead rank, and rank 0 tells the others.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use super::Member;
use super::hub::{Gathered, Given, Hub, MISSED};
use super::wire::{
    Kind, LostRank, MAX_PAYLOAD, bad, pack, parse, receive, send, send_json, unpack,
};
use crate::Result;
use crate::context::Health;

/// A peer that takes nothing for this long is taken for dead.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);
/// How long a rank that leaves waits for the other side to have read everything.
const PARTING: Duration = Duration::from_secs(1);
/// A host that went down says nothing; the system asks after it this often, three times.
const KEEPALIVE: Duration = Duration::from_secs(5);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prepares a connection for the time after the greeting.
fn settle_in(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_PATIENCE))?;
    stream.set_nodelay(true)?;
    let keepalive =
        TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE).with_retries(3);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

fn closed(error: &io::Error) -> String {
    format!("its connection closed ({error}): its process ended or its host went down")
}

/// Waits, not for long, until the threads that read have ended, which hold `shared` too. Closing with something unread
/// would make the system throw away what the other side has not read yet: the reason why a rank is lost, say.
fn wait_for_readers<T>(shared: &Arc<T>) {
    let start = Instant::now();
    while Arc::strong_count(shared) > 1 && start.elapsed() < PARTING {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Rank 0's side: the hub, and the connections to the others.
struct Root {
    hub: Hub,
    /// The connection of rank `i` is at `i - 1`.
    writers: Vec<Mutex<TcpStream>>,
    /// Whether the others were told of a lost rank.
    announced: Mutex<bool>,
}

impl Root {
    fn tell_all(&self, kind: Kind, payload: &[u8]) {
        for writer in &self.writers {
            let mut writer = lock(writer);
            if send(&mut *writer, kind, payload).is_err() {
                // Its reader then sees the end of the connection and reports the rank.
                let _ = writer.shutdown(Shutdown::Both);
            }
        }
    }

    // The others are told before this process's own rank is woken: once awake, it may end and close the connections.

    fn give(&self, rank: usize, bytes: Vec<u8>) {
        match self.hub.give(rank, bytes) {
            Given::Complete(all) => {
                self.tell_all(Kind::Gathered, &pack(&all));
                self.hub.publish(all);
            }
            Given::Pending => {}
            Given::Missed(missed) => self.lose(missed, MISSED),
        }
    }

    fn finished(&self, rank: usize) {
        match self.hub.finished(rank) {
            Ok(true) => {
                self.tell_all(Kind::Finished, &[]);
                self.hub.release();
            }
            Ok(false) => {}
            Err(missed) => self.lose(missed, MISSED),
        }
    }

    fn lose(&self, rank: usize, why: &str) {
        // Held to the end, so that everyone learns of the same rank first.
        let mut announced = lock(&self.announced);
        if !*announced {
            *announced = true;
            let news = LostRank { rank, why: why.to_owned() };
            self.tell_all(Kind::Lost, &serde_json::to_vec(&news).unwrap_or_default());
        }
        self.hub.lose(rank, why);
    }

    /// Serves one rank until it leaves.
    fn serve(&self, rank: usize, mut stream: TcpStream) {
        self.hear(rank, &mut stream);
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn hear(&self, rank: usize, stream: &mut TcpStream) {
        loop {
            match receive(stream, MAX_PAYLOAD) {
                Ok((Kind::Give, bytes)) => self.give(rank, bytes),
                Ok((Kind::Finished, _)) => self.finished(rank),
                Ok((Kind::Failed, why)) => return self.lose(rank, &String::from_utf8_lossy(&why)),
                Ok((kind, _)) => return self.lose(rank, &format!("it sent {kind:?} out of turn")),
                Err(_) if self.hub.is_finished() => return,
                Err(error) => return self.lose(rank, &closed(&error)),
            }
        }
    }
}

/// Rank 0.
pub(super) struct RootMember(Arc<Root>);

impl RootMember {
    /// `streams` are the connections of ranks 1, 2, ... in order, greeted.
    pub(super) fn start(streams: Vec<TcpStream>) -> io::Result<Self> {
        streams.iter().try_for_each(settle_in)?;
        let readers: Vec<TcpStream> =
            streams.iter().map(TcpStream::try_clone).collect::<Result<_, _>>()?;
        let hub = Hub::new(1 + streams.len());
        let writers = streams.into_iter().map(Mutex::new).collect();
        let root = Arc::new(Root { hub, writers, announced: Mutex::new(false) });
        for (index, stream) in readers.into_iter().enumerate() {
            let (root, rank) = (Arc::clone(&root), index + 1);
            std::thread::Builder::new()
                .name(format!("devcomm-rank-{rank}"))
                .spawn(move || root.serve(rank, stream))?;
        }
        Ok(Self(root))
    }
}

impl Member for RootMember {
    fn all_gather(&self, bytes: &[u8]) -> Result<Gathered> {
        self.0.hub.health().check()?;
        let round = self.0.hub.round();
        self.0.give(0, bytes.to_vec());
        self.0.hub.wait_for(round)
    }

    fn finish(&self) -> Result<()> {
        self.0.finished(0);
        self.0.hub.wait_for_all()
    }

    fn fail(&self, why: &str) {
        self.0.lose(0, why);
    }

    fn health(&self) -> &Arc<Health> {
        self.0.hub.health()
    }
}

impl Drop for RootMember {
    fn drop(&mut self) {
        // From here on a rank that leaves is none that is lost.
        *lock(&self.0.announced) = true;
        for writer in &self.0.writers {
            let _ = lock(writer).shutdown(Shutdown::Write);
        }
        wait_for_readers(&self.0);
        for writer in &self.0.writers {
            let _ = lock(writer).shutdown(Shutdown::Both);
        }
    }
}

/// The side of every other rank.
struct Client {
    state: Mutex<ClientState>,
    changed: Condvar,
    health: Arc<Health>,
    writer: Mutex<TcpStream>,
    rank: usize,
    n_ranks: usize,
}

#[derive(Default)]
struct ClientState {
    exchanges: VecDeque<Gathered>,
    finished: bool,
}

impl Client {
    fn lose(&self, rank: usize, why: &str) {
        // Under the lock, so that nobody falls asleep between looking at the health and waiting.
        let _state = lock(&self.state);
        self.health.lose(rank, why);
        self.changed.notify_all();
    }

    fn listen(&self, mut stream: TcpStream) {
        loop {
            let news = receive(&mut stream, MAX_PAYLOAD).and_then(|(kind, payload)| match kind {
                Kind::Gathered => {
                    let parts = unpack(&payload)?;
                    if parts.len() != self.n_ranks {
                        return Err(bad("an exchange of another number of ranks"));
                    }
                    lock(&self.state).exchanges.push_back(Arc::new(parts));
                    Ok(())
                }
                Kind::Finished => {
                    lock(&self.state).finished = true;
                    Ok(())
                }
                Kind::Lost => {
                    let lost: LostRank = parse(&payload)?;
                    self.lose(lost.rank, &lost.why);
                    Ok(())
                }
                other => Err(bad(format!("{other:?} out of turn"))),
            });
            self.changed.notify_all();
            if let Err(error) = news {
                if !lock(&self.state).finished {
                    self.lose(0, &closed(&error));
                }
                let _ = stream.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    fn send(&self, kind: Kind, payload: &[u8]) {
        let mut writer = lock(&self.writer);
        if send(&mut *writer, kind, payload).is_err() {
            // The listener reads on to the end, where it finds out why: rank 0's last words may wait there.
            let _ = writer.shutdown(Shutdown::Write);
        }
    }

    /// Waits until `ready` finds what it looks for.
    fn wait<T>(&self, mut ready: impl FnMut(&mut ClientState) -> Option<T>) -> Result<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some(found) = ready(&mut state) {
                return Ok(found);
            }
            self.health.check()?;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A rank other than 0.
pub(super) struct ClientMember(Arc<Client>);

impl ClientMember {
    /// `stream` is the connection to rank 0, greeted.
    pub(super) fn start(stream: TcpStream, rank: usize, n_ranks: usize) -> io::Result<Self> {
        settle_in(&stream)?;
        let reader = stream.try_clone()?;
        let client = Arc::new(Client {
            state: Mutex::default(),
            changed: Condvar::new(),
            health: Arc::default(),
            writer: Mutex::new(stream),
            rank,
            n_ranks,
        });
        let listener = Arc::clone(&client);
        std::thread::Builder::new()
            .name(format!("devcomm-rank-{rank}"))
            .spawn(move || listener.listen(reader))?;
        Ok(Self(client))
    }
}

impl Member for ClientMember {
    fn all_gather(&self, bytes: &[u8]) -> Result<Gathered> {
        self.0.health.check()?;
        self.0.send(Kind::Give, bytes);
        self.0.wait(|state| state.exchanges.pop_front())
    }

    fn finish(&self) -> Result<()> {
        self.0.send(Kind::Finished, &[]);
        self.0.wait(|state| state.finished.then_some(()))?;
        self.0.health.check()
    }

    fn fail(&self, why: &str) {
        self.0.send(Kind::Failed, why.as_bytes());
        self.0.lose(self.0.rank, why);
    }

    fn health(&self) -> &Arc<Health> {
        &self.0.health
    }
}

impl Drop for ClientMember {
    fn drop(&mut self) {
        let _ = lock(&self.0.writer).shutdown(Shutdown::Write);
        wait_for_readers(&self.0);
        let _ = lock(&self.0.writer).shutdown(Shutdown::Both);
    }
}

/// Sends one last frame to each of `streams`; who does not take it will notice the closed connection.
pub(super) fn dismiss(
    streams: &mut [Option<TcpStream>],
    kind: Kind,
    value: &impl serde::Serialize,
) {
    for stream in streams.iter_mut().flatten() {
        let _ = send_json(stream, kind, value);
    }
}
