//! Tests of ranks that are processes: this test program starts itself as a job.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Display;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::*;
use crate::sys::process::inherited_listener;
use crate::world::env::launched;
use crate::world::local_job::LocalJob;

/// Returns a job whose ranks run the test of this name again, without its output. In them,
/// [`as_rank`] returns the configuration.
pub(super) fn job(test: &str, n_ranks: usize) -> LocalJob {
    let this = std::env::current_exe().unwrap();
    let script = r#"exec "$0" --exact "$1" > /dev/null"#;
    let args = [OsStr::new("-c"), script.as_ref(), this.as_ref(), test.as_ref()];
    LocalJob::new(n_ranks).unwrap().program("/bin/sh").args(args).env(ROLE, test)
}

/// The variable with the name of the test that a process runs as a rank.
pub(super) const ROLE: &str = "DEVCOMM_TEST_ROLE";

/// Returns the configuration of this process, if it is a rank of this test.
pub(super) fn as_rank(test: &str) -> Option<RendezvousConfig> {
    std::env::var_os(ROLE).filter(|role| role == test)?;
    let launched = launched(&|name| std::env::var_os(name)).unwrap().unwrap();
    let peer = Peer { host: format!("host{}", launched.rank), nccl: NCCL };
    Some(RendezvousConfig::new(launched, peer))
}

/// Returns the file to which a rank prints, beside a socket.
pub(super) fn printed_by(rank: usize, socket: impl AsRef<Path>) -> PathBuf {
    socket.as_ref().with_extension(rank.to_string())
}

/// Redirects the standard error of this process to this file, for panics too.
pub(super) fn print_to(path: &Path) {
    let file = std::fs::File::create(path).unwrap();
    // SAFETY: both descriptors are open; the standard error stays so.
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), libc::STDERR_FILENO) }, 2);
    // The hook of the test harness would keep what panics print.
    std::panic::set_hook(Box::new(|panic| {
        let _ = writeln!(std::io::stderr(), "{panic}");
    }));
}

/// Returns the names in /dev/shm that NCCL or devcomm may have made.
pub(super) fn shared_memory() -> BTreeSet<String> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("nccl") || name.contains("devcomm")).collect()
}

/// Returns the processes that have this folder in their environment.
pub(super) fn processes_of(folder: &Path) -> Vec<PathBuf> {
    let folder = folder.to_str().unwrap().as_bytes();
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    // Reading fails for entries that are not processes, and for those of other users.
    let ours = |process: &PathBuf| {
        let environment = std::fs::read(process.join("environ")).unwrap_or_default();
        environment.windows(folder.len()).any(|part| part == folder)
    };
    processes.filter(ours).collect()
}

/// Checks that no process has this folder in its environment, and that no shared memory is new.
pub(super) fn require_nothing_left(folder: &Path, shared_before: &BTreeSet<String>) {
    assert_eq!(processes_of(folder), Vec::<PathBuf>::new());
    let left: Vec<_> = shared_memory().difference(shared_before).cloned().collect();
    assert_eq!(left, Vec::<String>::new());
}

/// Exchanges in the world and in a subset, and then finishes.
fn work(config: &RendezvousConfig) -> Result<()> {
    let world = config.join()?;
    let (own, n) = (world.rank(), world.n_ranks());
    let members: Vec<usize> = (0..n).filter(|rank| rank % 2 == own % 2).collect();
    let subset = world.subset(&members)?;
    let text = |rank: &dyn Display| format!("rank {rank}").into_bytes();
    for _ in 0..5 {
        assert_eq!(*world.all_gather(&text(&own))?, (0..n).map(|r| text(&r)).collect::<Vec<_>>());
        let all = subset.all_gather(&text(&own))?;
        assert_eq!(*all, members.iter().map(|r| text(r)).collect::<Vec<_>>());
    }
    assert_eq!(threads(), [format!("devcomm-rank-{own}")]);
    world.finish()
}

/// Returns the names of this process's threads for the rendezvous.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap().trim().to_owned()
    };
    tasks.map(name).filter(|name| name.starts_with("devcomm-")).collect()
}

#[test]
fn sixty_four_processes_with_one_thread_each_meet_exchange_and_finish() {
    const TEST: &str = "world::rendezvous::tests::processes::\
        sixty_four_processes_with_one_thread_each_meet_exchange_and_finish";
    if let Some(config) = as_rank(TEST) {
        assert_eq!(config.n_ranks, 64);
        return work(&config).unwrap();
    }
    job(TEST, 64).run().unwrap();
}

#[test]
fn many_small_jobs_at_once_do_not_meet_each_other() {
    const TEST: &str =
        "world::rendezvous::tests::processes::many_small_jobs_at_once_do_not_meet_each_other";
    if let Some(config) = as_rank(TEST) {
        return work(&config).unwrap();
    }
    thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| job(TEST, 3).run().unwrap());
        }
    });
}

#[test]
fn rank_0_inherits_the_socket_and_the_others_do_not() {
    const TEST: &str =
        "world::rendezvous::tests::processes::rank_0_inherits_the_socket_and_the_others_do_not";
    if let Some(config) = as_rank(TEST) {
        let listening = (3..64).filter(|&fd| inherited_listener(fd, config.port).is_ok());
        assert_eq!(listening.collect::<Vec<_>>(), Vec::from_iter(config.listener));
        assert_eq!(config.listener.is_some(), config.rank == 0);
        assert!(config.job.starts_with("local-") && config.job.len() == 38, "{}", config.job);
        // Twice: the inherited socket can be used again.
        return (0..2).for_each(|_| work(&config).unwrap());
    }
    job(TEST, 3).run().unwrap();
}
