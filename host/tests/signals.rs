//! Tests of signals to launchers and ranks. This is a separate test program, because a signal goes
//! to the whole process.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use devcomm_host::{Error, LocalJob, ReduceOp, World, WorldError};

/// A lock that each test with a job holds: a signal to this process ends all of its jobs.
static ONE_JOB: Mutex<()> = Mutex::new(());

/// Runs a job whose ranks ignore signals, and whose rank 0 signals the launcher once both ranks
/// have written their process ids.
fn interrupted(signal: &'static str) {
    let folder = tempfile::tempdir().unwrap();
    let launcher = std::process::id();
    let script = r#"trap '' TERM INT HUP
        echo $$ > "$OUT/$RANK.part"; mv "$OUT/$RANK.part" "$OUT/$RANK"
        if [ $RANK = 0 ]; then
            while [ ! -e "$OUT/1" ]; do sleep 0.01; done
            kill -$SIGNAL $LAUNCHER
        fi
        exec sleep 600"#;
    let start = Instant::now();
    let error = LocalJob::new(2)
        .unwrap()
        .program("/bin/sh")
        .args(["-c", script])
        .env("OUT", folder.path())
        .env("LAUNCHER", launcher.to_string())
        .env("SIGNAL", signal.trim_start_matches("SIG"))
        .run()
        .unwrap_err();
    assert!(
        matches!(error, Error::World(WorldError::Interrupted { signal: s }) if s == signal),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(60));
    for rank in ["0", "1"] {
        let id = std::fs::read_to_string(folder.path().join(rank)).unwrap();
        let process = std::path::Path::new("/proc").join(id.trim());
        assert!(!process.exists(), "rank {rank} is still there");
    }
}

#[test]
fn a_signal_to_the_launcher_ends_all_ranks_of_one_job_after_the_other() {
    let _alone = ONE_JOB.lock();
    ["SIGTERM", "SIGINT", "SIGHUP", "SIGTERM"].into_iter().for_each(interrupted);
}

#[test]
fn a_launcher_passes_sigusr1_on() {
    let _alone = ONE_JOB.lock();
    let folder = tempfile::tempdir().unwrap();
    let script = r#"trap 'exit 0' USR1
        echo > "$OUT/$RANK"
        if [ $RANK = 0 ]; then
            while [ ! -e "$OUT/1" ]; do sleep 0.01; done
            kill -USR1 $LAUNCHER
        fi
        i=0; while [ $i -lt 600 ]; do sleep 0.1; i=$((i + 1)); done; exit 1"#;
    let job = LocalJob::new(2).unwrap().program("/bin/sh").args(["-c", script]);
    let job = job.env("OUT", folder.path()).env("LAUNCHER", std::process::id().to_string());
    job.run().unwrap();
}

#[test]
fn sigusr1_to_a_launcher_does_not_end_ranks_without_a_handler() {
    let _alone = ONE_JOB.lock();
    let script = r#"[ $RANK = 0 ] && kill -USR1 $LAUNCHER; sleep 1"#;
    let job = LocalJob::new(2).unwrap().program("/bin/sh").args(["-c", script]);
    job.env("LAUNCHER", std::process::id().to_string()).run().unwrap();
}

/// Runs the test `name` again in a process of its own, which a shell starts after `first`.
fn in_child(first: &str, name: &str) {
    let own = std::env::current_exe().unwrap();
    let script = format!("{first}; exec \"$0\" --exact {name} --nocapture");
    let ran = Command::new("/bin/sh").arg("-c").arg(script).arg(own).env(CHILD, "1").status();
    assert!(ran.unwrap().success());
}

/// Runs a job whose rank sends this signal to its launcher and ends.
fn job_that_sends(signal: &str) -> Result<(), Error> {
    let script = r#"kill -$SIGNAL $LAUNCHER; sleep 0.3"#;
    let job = LocalJob::new(1).unwrap().program("/bin/sh").args(["-c", script]);
    job.env("SIGNAL", signal).env("LAUNCHER", std::process::id().to_string()).run()
}

#[test]
fn a_signal_that_the_launcher_ignores_does_not_end_its_job() {
    let name = "a_signal_that_the_launcher_ignores_does_not_end_its_job";
    if std::env::var_os(CHILD).is_none() {
        return in_child("trap '' HUP", name);
    }
    job_that_sends("HUP").unwrap();
    let ended = job_that_sends("TERM").unwrap_err();
    assert!(matches!(ended, Error::World(WorldError::Interrupted { signal: "SIGTERM" })));
}

#[test]
fn a_programs_own_handler_of_a_signal_decides_before_and_after_a_job() {
    let name = "a_programs_own_handler_of_a_signal_decides_before_and_after_a_job";
    if std::env::var_os(CHILD).is_none() {
        return in_child(":", name);
    }
    let comes = std::sync::Arc::new(AtomicUsize::new(0));
    // SAFETY: the handler changes an atomic variable only.
    unsafe {
        let comes = comes.clone();
        let count = move || {
            comes.fetch_add(1, Ordering::SeqCst);
        };
        signal_hook::low_level::register(signal_hook::consts::SIGTERM, count).unwrap();
    }
    assert!(job_that_sends("TERM").is_err());
    // The default action would end this process.
    signal_hook::low_level::raise(signal_hook::consts::SIGTERM).unwrap();
    assert_eq!(comes.load(Ordering::SeqCst), 2);
}

/// Set in the process of [`sigusr1_makes_ranks_print_what_they_do`] that has ranks.
const CHILD: &str = "DEVCOMM_TEST_CHILD";

/// Runs two ranks, of which rank 1 raises SIGUSR1 while rank 0 waits for it in an exchange.
fn ask() {
    let ended = World::simulated(2).unwrap().run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let buffer = comm.mem_alloc::<f32>(1000)?;
        comm.all_reduce(&buffer, &buffer, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        if rank.rank() == 1 {
            // SAFETY: the signal has a handler.
            unsafe { libc::raise(libc::SIGUSR1) };
            // Rank 0 waits in the barrier while another thread prints.
            std::thread::sleep(Duration::from_secs(1));
        }
        rank.barrier()
    });
    ended.unwrap();
}

/// Returns what a copy of this test program prints to the standard error.
fn printed_with(variables: &[(&str, &str)], test: &str) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(CHILD, "1").env_remove("DEVCOMM_LOG");
    let output = child.envs(variables.iter().copied()).output().unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{printed}");
    printed
}

#[test]
fn sigusr1_makes_ranks_print_what_they_do() {
    if std::env::var_os(CHILD).is_some() {
        return ask();
    }
    let printed = printed_with(&[], "sigusr1_makes_ranks_print_what_they_do");
    let ranks = printed.split_once("rank 1 of 2: the last ");
    let (rank_0, rank_1) = ranks.unwrap_or_else(|| panic!("{printed}"));
    assert!(rank_0.starts_with("rank 0 of 2: the last "), "{printed}");
    for rank in [rank_0, rank_1] {
        let call =
            rank.lines().find(|line| line.contains("  ncclAllReduce of 1000 elements Float32"));
        assert!(call.unwrap().contains("Sum: returned after "), "{printed}");
        let wait = rank.lines().find(|line| line.contains("  wait for stream 0x"));
        assert!(wait.unwrap().contains(": returned after "), "{printed}");
    }
    assert!(rank_0.ends_with("exchange of 2 ranks for barrier: has not returned\n"), "{printed}");
    assert!(!rank_1.contains("has not returned"), "{printed}");
}

#[test]
fn devcomm_log_says_what_each_rank_does_and_for_how_long() {
    if std::env::var_os(CHILD).is_some() {
        return ask();
    }
    let test = "devcomm_log_says_what_each_rank_does_and_for_how_long";
    let logged = printed_with(&[("DEVCOMM_LOG", "devcomm_host=debug")], test);
    for rank in [0, 1] {
        let call = format!("operation{{rank=\"rank {rank} of 2\" what=ncclAllReduce of 1000 ");
        let line = logged.lines().find(|line| line.contains(&call));
        let line = line.unwrap_or_else(|| panic!("{logged}"));
        assert!(line.contains("DEBUG") && line.contains("close time.busy="), "{line}");
    }
    assert!(!printed_with(&[("DEVCOMM_LOG", "warn")], test).contains("DEBUG"));
}
