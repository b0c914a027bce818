//! The one thread that a process has for its connections to ranks that have joined. It hands over
//! what arrives, sends what could not be sent at once, and calls [`Service::beat`] at intervals.

use std::io;
use std::net::Shutdown;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connection::{Connection, Waker, poll};
use super::wire::{Kind, MAX_FRAME};
use crate::machine::start_thread;
use crate::sys::fork::Process;

/// How long a process that closes its connections waits for its peers to have read everything.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to retry while the system has no room for the thread.
const SPAWN_LIMIT: Duration = Duration::from_secs(10);

/// The connections of a process, to which any of its threads can send.
pub(super) struct Links {
    connections: Vec<Connection>,
    /// Wakes the [`ServiceThread`], which polls the connections.
    waker: Waker,
    /// Whether the thread is to close the connections. Set once, before the waker wakes the thread;
    /// it publishes no other memory.
    closing: AtomicBool,
}

impl Links {
    pub(super) fn new(connections: Vec<Connection>) -> io::Result<Self> {
        Ok(Self { connections, waker: Waker::new()?, closing: AtomicBool::new(false) })
    }

    pub(super) fn len(&self) -> usize {
        self.connections.len()
    }

    /// Sends a frame, whose payload consists of several slices.
    pub(super) fn send(&self, index: usize, kind: Kind, payload: &[&[u8]]) {
        let connection = &self.connections[index];
        match connection.send(kind, payload) {
            Ok(true) => {}
            Ok(false) => self.waker.wake(),
            // The peer may have sent the reason before it closed, which is read first.
            Err(_) => connection.shutdown(Shutdown::Write),
        }
    }
}

/// The reaction of a process to the messages that arrive.
pub(super) trait Service: Send + Sync + 'static {
    fn links(&self) -> &Links;

    /// Notes that the peer has sent something, be it a part of a frame.
    fn heard(&self, index: usize);

    /// Handles a frame, or the end of a connection. Returns whether the connection stays open,
    /// which it does not after its end.
    fn handle(&self, index: usize, received: io::Result<(Kind, Vec<u8>)>) -> bool;

    /// Tells the peers that this process runs, and finds those that do not. Returns whether to go
    /// on.
    fn beat(&self) -> bool;

    /// Returns the time between two beats.
    fn interval(&self) -> Duration;
}

/// A service and its thread, which ends when this is dropped.
pub(super) struct ServiceThread<S: Service> {
    service: Arc<S>,
    process: Process,
    thread: Option<JoinHandle<()>>,
}

impl<S: Service> ServiceThread<S> {
    pub(super) fn start(rank: usize, service: S) -> io::Result<Self> {
        let service = Arc::new(service);
        let shared = Arc::clone(&service);
        let name = format!("devcomm-rank-{rank}");
        let thread = start_thread(&name, SPAWN_LIMIT, move || run(&*shared))?;
        Ok(Self { service, process: Process::current(), thread: Some(thread) })
    }
}

impl<S: Service> Deref for ServiceThread<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.service
    }
}

impl<S: Service> Drop for ServiceThread<S> {
    /// Waits, at most [`CLOSE_TIMEOUT`], until the peers have closed their connections too. If a
    /// socket is closed with unread data, TCP resets the connection, and its peer may lose
    /// messages, such as why a rank is lost.
    fn drop(&mut self) {
        let links = self.service.links();
        links.closing.store(true, Ordering::Release);
        links.waker.wake();
        let thread = self.thread.take();
        // A forked child has no such thread. An error is a panic of it, which it has reported.
        let _ = thread.filter(|_| self.process.is_current()).map(JoinHandle::join);
    }
}

fn run(service: &impl Service) {
    let Links { connections, waker, closing } = service.links();
    // When to beat, if that goes on, and when to give up closing, once that has begun.
    let (mut beat, mut end) = (Some(Instant::now()), None);
    let mut open: Vec<usize> = (0..connections.len()).collect();
    // Frames that arrived earlier may be in the connections' buffers already.
    let mut ready = vec![true; open.len()];
    loop {
        let mut ready_ones = ready.into_iter();
        open.retain(|&index| ready_ones.next() != Some(true) || hear(service, index));
        if beat.is_some_and(|beat| beat <= Instant::now()) {
            beat = service.beat().then(|| Instant::now() + service.interval());
        }
        if closing.load(Ordering::Acquire) {
            end.get_or_insert_with(|| Instant::now() + CLOSE_TIMEOUT);
            for &index in &open {
                // Once all is sent, or nothing can be.
                if !matches!(connections[index].flush(), Ok(false)) {
                    connections[index].shutdown(Shutdown::Write);
                }
            }
        }
        let now = Instant::now();
        if open.is_empty() || end.is_some_and(|end| end <= now) {
            break;
        }
        let next = [beat, end].into_iter().flatten().min();
        let fds = open.iter().map(|&index| connections[index].poll_fd());
        let mut fds: Vec<_> = fds.chain([waker.poll_fd()]).collect();
        ready = poll(&mut fds, next.map(|next| next.saturating_duration_since(now)));
        // The waker is the last one.
        if ready.pop() == Some(true) {
            waker.clear();
        }
    }
    connections.iter().for_each(|connection| connection.shutdown(Shutdown::Both));
}

/// Handles what has arrived at a connection, and sends what is unsent. Returns whether it stays
/// open.
fn hear(service: &impl Service, index: usize) -> bool {
    let connection = &service.links().connections[index];
    // If this fails, so does reading.
    let _ = connection.flush();
    let arrived = connection.read();
    if let Ok(true) = arrived {
        service.heard(index);
    }
    let end = arrived.err();
    let frames = std::iter::from_fn(|| connection.next(MAX_FRAME).transpose());
    let open = frames.chain(end.map(Err)).all(|received| service.handle(index, received));
    if !open {
        connection.shutdown(Shutdown::Both);
    }
    open
}
