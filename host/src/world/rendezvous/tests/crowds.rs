//! Tests with more connections, files or threads than there is room for.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::super::listen::Listeners;
use super::super::strangers::Strangers;
use super::processes::{as_rank, job};
use super::tokens::with_token;
use super::*;

#[test]
fn hundreds_of_silent_strangers_do_not_keep_the_ranks_away() {
    let configs = configs(2, AMPLE);
    thread::scope(|scope| {
        let root = scope.spawn(|| configs[0].join()?.barrier());
        // The first one sends late, but is not among those that are closed.
        let mut slow = connect_from(2, &configs[0]);
        let strangers: Vec<_> = (0..400).map(|_| connect_from(3, &configs[0])).collect();
        send_json(&mut slow, Kind::Hello, &Hello { protocol: 9, ..hello(1, 2) }).unwrap();
        let (kind, why) = next_message(&mut slow);
        assert_eq!((kind, why.starts_with(b"it uses version 9")), (Kind::Refused, true));
        configs[1].join().unwrap().barrier().unwrap();
        root.join().unwrap().unwrap();
        drop(strangers);
    });
}

#[test]
fn of_an_address_with_too_many_connections_one_that_has_said_nothing_is_closed_first() {
    let config = with_token(2, AMPLE).remove(0);
    let listener = TcpListener::bind(("127.0.0.1", config.port)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (mut strangers, mut heard) = (Strangers::new(&config), Vec::new());
    let mut wait = |heard: &mut Vec<_>| {
        strangers.wait(std::slice::from_ref(&listener), Duration::from_millis(1), heard).unwrap();
    };
    // The first one has sent its greeting, but no proof yet. Another address has a connection, too.
    let mut first = connect_from(2, &config);
    send_json(&mut first, Kind::Hello, &Hello { nonce: Some([1; 32]), ..hello(1, 2) }).unwrap();
    first.set_nonblocking(true).unwrap();
    let start = Instant::now();
    while first.peek(&mut [0]).is_err() {
        assert!(start.elapsed() < AMPLE);
        wait(&mut heard);
    }
    let _other = connect_from(3, &config);
    let mut silent = Vec::new();
    while heard.is_empty() {
        silent.push(connect_from(2, &config));
        wait(&mut heard);
    }
    // 256 are open at a time.
    assert_eq!((silent.len(), heard.len()), (255, 1));
    assert_eq!(heard[0].0, silent[0].local_addr().unwrap());
}

#[test]
fn an_address_that_fails_too_often_is_heard_after_the_others() {
    let config = configs(2, AMPLE).remove(0);
    let listener = TcpListener::bind(("127.0.0.1", config.port)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut strangers = Strangers::new(&config);
    (0..1000).for_each(|port| strangers.blame(SocketAddr::from(([127, 0, 0, 2], port))));
    let mut streams = [2, 3].map(|last| connect_from(last, &config));
    for stream in &mut streams {
        send_json(stream, Kind::Hello, &hello(1, 2)).unwrap();
    }
    let (start, mut heard) = (Instant::now(), Vec::new());
    while heard.len() < 2 {
        assert!(start.elapsed() < AMPLE);
        strangers.wait(std::slice::from_ref(&listener), AMPLE, &mut heard).unwrap();
    }
    let from: Vec<IpAddr> = heard.iter().map(|(from, _)| from.ip()).collect();
    assert_eq!(from, [3, 2].map(|last| IpAddr::from([127, 0, 0, last])));
    assert!(heard.iter().all(|(_, result)| result.is_ok()));
    assert_eq!(from[1], Ipv4Addr::new(127, 0, 0, 2));
}

const SILENT: usize = 100;
const WELCOMED: &str = "DEVCOMM_TEST_WELCOMED";

/// Limits how much of a resource this process may use in addition to what is `used`.
fn limit(resource: Resource, more: u64, used: u64) {
    setrlimit(resource, Rlimit { current: Some(used + more), ..getrlimit(resource) }).unwrap();
}

/// Runs a rank 0 that can open few files, and start no thread until rank 1 was welcomed.
fn poor_root(config: &RendezvousConfig, welcomed: &Path) -> Result<()> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    limit(Resource::Nofile, 8, open as u64);
    let files: Vec<File> = (0..SILENT).map_while(|_| File::open("/dev/null").ok()).collect();
    assert!(files.len() < SILENT / 2, "{files:?}");
    drop(files);
    let (started, unlimited) = (std::sync::Barrier::new(2), getrlimit(Resource::As));
    thread::scope(|scope| {
        scope.spawn(|| {
            started.wait();
            while !welcomed.exists() {
                thread::sleep(Duration::from_millis(2));
            }
            thread::sleep(Duration::from_millis(200));
            setrlimit(Resource::As, unlimited).unwrap();
        });
        // The thread has started: its memory is counted below.
        started.wait();
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        // Less than a thread's stack.
        limit(Resource::As, 1 << 20, pages * 4096);
        assert!(thread::Builder::new().spawn(|| ()).is_err());
        let world = config.join()?;
        world.barrier()?;
        world.finish()
    })
}

#[test]
fn too_many_open_files_and_threads_that_do_not_start_do_not_end_the_job() {
    const TEST: &str = "world::rendezvous::tests::crowds::\
        too_many_open_files_and_threads_that_do_not_start_do_not_end_the_job";
    if let Some(config) = as_rank(TEST) {
        let welcomed = std::env::var_os(WELCOMED).unwrap();
        if config.rank == 0 {
            return poor_root(&config, welcomed.as_ref()).unwrap();
        }
        let _silent: Vec<_> = (0..SILENT).map(|_| connect(&config)).collect();
        let world = config.join().unwrap();
        File::create(welcomed).unwrap();
        world.barrier().unwrap();
        return world.finish().unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    job(TEST, 2).env(WELCOMED, folder.path().join("welcomed")).run().unwrap();
}

#[test]
fn hundreds_of_ranks_connect_before_one_is_accepted() {
    // A system that allows no more, as older ones with 128, is not the ranks' fault.
    let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    let ranks = allowed.trim().parse::<usize>().unwrap().min(300);
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let listeners = Listeners::bind_all(&[any], 0).unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], listeners.port().unwrap()));
    let connect = |_| TcpStream::connect_timeout(&address, Duration::from_secs(1)).unwrap();
    let connected: Vec<_> = (0..ranks).map(connect).collect();
    assert_eq!(connected.len(), ranks);
}
