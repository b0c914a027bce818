//! Tests with jobs in which one process is killed at a random moment: all others end with an error
//! soon, and no process remains.

use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use super::processes::{as_rank, job, require_nothing_left, shared_memory};
use super::*;
use crate::error::{Error, WorldError};
use crate::world::local_job::Ranks;

const TEST: &str =
    "world::rendezvous::tests::kills::when_a_process_is_killed_all_others_end_with_an_error";
/// How many processes are killed, unless DEVCOMM_KILLS says another number.
const KILLS: usize = 250;
/// Concurrent jobs: more than processors, since their processes mostly wait.
const CONCURRENT: usize = 8;
/// The timeout of joining for jobs whose rank is killed while the ranks join, about one in ten.
const JOIN_LIMIT: Duration = Duration::from_secs(1);
/// How soon after the kill the others must have ended, even on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(10);
/// Exit code of a rank: ranks were missing.
const MISSING: i32 = 50;
/// Exit code of a rank, plus the number of the rank that was lost.
const LOST: i32 = 100;

const SOCKET: &str = "DEVCOMM_TEST_SOCKET";

/// Exchanges with the other ranks until one is lost.
fn exchange_until_lost(config: &RendezvousConfig) -> Result<()> {
    let world = config.join()?;
    let (own, n) = (world.rank(), world.n_ranks());
    // Pairs, and a subset of one rank if the number of ranks is odd.
    let pair: Vec<usize> = (0..n).filter(|rank| rank / 2 == own / 2).collect();
    let pair = world.subset(&pair)?;
    world.barrier()?;
    let supervisor = UnixDatagram::unbound().unwrap();
    supervisor.send_to(&[own as u8], std::env::var_os(SOCKET).unwrap()).unwrap();
    let mut random = fastrand::Rng::with_seed(own as u64);
    loop {
        world.all_gather(&vec![1; random.usize(..3) * random.usize(..30_000)])?;
        pair.barrier()?;
    }
}

/// Runs a rank and exits with its code.
fn run_as_rank(config: &RendezvousConfig) -> ! {
    let code = match exchange_until_lost(config) {
        Err(Error::World(WorldError::RankLost { rank, .. })) => LOST + rank as i32,
        Err(Error::World(WorldError::RanksMissing { .. })) => MISSING,
        other => {
            eprintln!("{other:?}");
            1
        }
    };
    std::process::exit(code)
}

/// The result of one kill.
struct Outcome {
    /// The time from the kill to the end of the last survivor.
    took: Duration,
    /// Whether the ranks were joining.
    joining: bool,
}

/// Starts a job and kills one rank. `None` if that rank had ended because others were missing: on
/// a busy machine, ranks may start too late.
fn kill_one(seed: usize, folder: &Path) -> Option<Outcome> {
    let mut random = fastrand::Rng::with_seed(seed as u64);
    let n = 2 + random.usize(..3);
    let victim = random.usize(..n);
    let joining = random.usize(..10) == 0;
    let moment = Duration::from_micros(random.usize(..12_000) as u64);

    let path = folder.join(seed.to_string());
    let started = UnixDatagram::bind(&path).unwrap();
    started.set_read_timeout(Some(AMPLE)).unwrap();
    let timeout = if joining { JOIN_LIMIT } else { AMPLE };
    let job = job(TEST, n).env(SOCKET, &path).env("DEVCOMM_TIMEOUT", timeout.as_secs().to_string());
    let mut ranks = Ranks::start(&job).unwrap();
    if !joining {
        for _ in 0..n {
            assert_eq!(started.recv(&mut [0; 8]).unwrap(), 1, "seed {seed}");
        }
    }
    thread::sleep(moment);
    let mut killed = ranks.running[victim].take().unwrap();
    killed.kill().unwrap();
    let start = Instant::now();
    let ended = killed.wait().unwrap();
    if joining && ended.code() == Some(MISSING) {
        std::fs::remove_file(path).unwrap();
        return None;
    }
    assert_eq!(ended.signal(), Some(9), "seed {seed}: rank {victim} of {n} had ended: {ended}");

    let mut survivors: Vec<(usize, Option<ExitStatus>)> =
        (0..n).filter(|&rank| rank != victim).map(|rank| (rank, None)).collect();
    while survivors.iter().any(|(_, status)| status.is_none()) {
        assert!(start.elapsed() < timeout.min(JOIN_LIMIT) + DEADLINE, "seed {seed}: {survivors:?}");
        for (rank, status) in &mut survivors {
            let child = ranks.running[*rank].as_mut().unwrap();
            *status = child.try_wait().unwrap();
        }
        thread::sleep(Duration::from_millis(2));
    }
    let took = start.elapsed();
    for (rank, status) in survivors {
        let code = status.and_then(|status| status.code());
        let lost = Some(LOST + victim as i32);
        let expected = match code {
            Some(MISSING) => joining,
            code => code == lost,
        };
        assert!(
            expected,
            "seed {seed}: rank {rank} of {n} ended with {status:?}; rank {victim} was killed"
        );
    }
    std::fs::remove_file(path).unwrap();
    Some(Outcome { took, joining })
}

#[test]
fn when_a_process_is_killed_all_others_end_with_an_error() {
    if let Some(config) = as_rank(TEST) {
        run_as_rank(&config);
    }
    let (folder, shared_before) = (tempfile::tempdir().unwrap(), shared_memory());
    let kills = number_of("DEVCOMM_KILLS", KILLS);
    let start = Instant::now();
    let outcomes = run_each(kills, CONCURRENT, |seed| {
        (0..10).find_map(|_| kill_one(seed, folder.path())).unwrap()
    });
    require_nothing_left(folder.path(), &shared_before);
    assert_eq!(outcomes.len(), kills);
    for (joining, what) in [(false, "exchanging"), (true, "joining")] {
        let mut took: Vec<Duration> =
            outcomes.iter().filter(|one| one.joining == joining).map(|one| one.took).collect();
        took.sort();
        // A few kills may all come in one phase.
        let Some(last) = took.last() else { continue };
        let (count, median) = (took.len(), took[took.len() / 2]);
        println!(
            "{count} kills while {what}: the others ended after {median:.1?}, at most {last:.1?}"
        );
    }
    println!("{kills} kills in {:.1?}", start.elapsed());
}
